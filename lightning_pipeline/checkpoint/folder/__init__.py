"""The folder of a checkpoint: names, manifest, files, and how it is committed."""

from lightning_pipeline.checkpoint.folder import faults
from lightning_pipeline.checkpoint.folder.commit import clean, discard, point_link, publish, sync_folder
from lightning_pipeline.checkpoint.folder.hashing import HashingStream
from lightning_pipeline.checkpoint.folder.manifest import (
    WAY_OUT,
    Manifest,
    read_manifest,
    stamp_file,
    verify_file,
    write_manifest,
)
from lightning_pipeline.checkpoint.folder.names import (
    MANIFEST,
    META,
    METADATA,
    MODEL,
    OURS,
    beside,
    is_folder,
    local_path,
    optimizer_key,
)
from lightning_pipeline.checkpoint.folder.pace import Pace
from lightning_pipeline.checkpoint.folder.reader import Reader
from lightning_pipeline.checkpoint.folder.safe import is_plain, load_object
from lightning_pipeline.checkpoint.folder.tensor_file import check_kinds, write_tensors
from lightning_pipeline.checkpoint.folder.writer import Writer, check_owners, described

__all__ = [
    "MANIFEST",
    "META",
    "METADATA",
    "MODEL",
    "OURS",
    "WAY_OUT",
    "HashingStream",
    "Manifest",
    "Pace",
    "Reader",
    "Writer",
    "beside",
    "check_kinds",
    "check_owners",
    "clean",
    "described",
    "discard",
    "faults",
    "is_folder",
    "is_plain",
    "load_object",
    "local_path",
    "optimizer_key",
    "point_link",
    "publish",
    "read_manifest",
    "stamp_file",
    "sync_folder",
    "verify_file",
    "write_manifest",
    "write_tensors",
]
