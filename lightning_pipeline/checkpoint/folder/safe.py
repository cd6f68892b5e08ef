"""Reads a checkpoint's pickled parts without letting them run code."""

import argparse
import collections
import io
import pathlib
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.utilities.data import AttributeDict
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from lightning_pipeline._torch import MEMORY_FORMAT
from lightning_pipeline.checkpoint.folder.manifest import safe_file
from lightning_pipeline.checkpoint.folder.names import METADATA
from lightning_pipeline.errors import CheckpointCorruptError, UnsafeCheckpointError

_WAY_OUT = (
    "nothing of it was run. If you know who made this checkpoint, read it with "
    "PipelineStrategy(trust_checkpoint=True)"
)
_METADATA_NAMES = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (metadata, ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                    "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        (filesystem, ("_StorageInfo",)),
        (torch, ("Size",)),
    )
    for name in names
}  # fmt: skip
_PLAIN_CLASSES: list[Any] = [
    AttributeDict, argparse.Namespace, collections.deque, pathlib.Path, pathlib.PurePath,
    pathlib.PosixPath, pathlib.PurePosixPath, torch.device, torch.Size,
    *({pathlib.WindowsPath, pathlib.PureWindowsPath}),
]  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata and nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _METADATA_NAMES:
            return _METADATA_NAMES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in (
            ("pathlib", "PosixPath"),
            ("pathlib", "PurePosixPath"),
            ("pathlib._local", "PosixPath"),
        ):
            return pathlib.PurePosixPath
        raise UnsafeCheckpointError(f"{module}.{name}")


def _layout(name: str) -> Any:
    layouts = {"torch.strided": torch.strided}
    return layouts[name]


def _member(of: Any, name: Any) -> Any:
    """What Python before 3.11.4 writes for a member of an enumeration: `getattr`, its class and its name."""
    if of is MEMORY_FORMAT and name in of.__members__:
        return of[name]
    raise UnsafeCheckpointError(f"builtins.getattr of {of!r}")


def read_metadata(folder: Path, *, trust: bool) -> Metadata:
    """DCP's list of what lies where in a checkpoint, with every path in it checked.

    Args:
        folder: The checkpoint.
        trust: Whether classes beyond DCP's own may be unpickled.

    Raises:
        UnsafeCheckpointError: It names other classes, or files outside the folder.
        CheckpointCorruptError: It cannot be read.
    """
    path = safe_file(folder, METADATA)
    try:
        content = path.read_bytes()
        found = pickle.loads(content) if trust else _MetadataUnpickler(io.BytesIO(content)).load()
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"checkpoint file {path} asks for {error}: {_WAY_OUT}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointCorruptError(f"checkpoint file {path} is damaged: {error!r}") from error
    _check_metadata(folder, found)
    return found  # type: ignore[no-any-return]  # checked


def _check_metadata(folder: Path, found: Any) -> None:
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise UnsafeCheckpointError(f"checkpoint file {folder / METADATA} holds something else: {_WAY_OUT}")
    for info in found.storage_data.values():
        safe_file(folder, str(info.relative_path))
        if getattr(info, "transform_descriptors", None):
            raise UnsafeCheckpointError(f"checkpoint {folder} was written through an extension: {_WAY_OUT}")


def load_object(
    source: Path | IO[bytes], where: str, *, trust: bool, mmap: bool = False, place: str = "cpu"
) -> Any:
    """`torch.load` of plain values and tensors.

    Args:
        source: To read.
        where: What it is, for messages.
        trust: Whether any class may be unpickled.
        mmap: Whether tensors stay in the file until they are used.
        place: Device of the tensors; on `meta` no data is read.

    Raises:
        UnsafeCheckpointError: It names other classes.
        CheckpointCorruptError: It cannot be read.
    """
    if not trust:
        _refuse_compressed(source, where)
    try:
        with torch.serialization.safe_globals([] if trust else _PLAIN_CLASSES):
            return torch.load(source, map_location=place, weights_only=not trust, mmap=mmap or None)
    except pickle.UnpicklingError as error:
        asked = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
        raise UnsafeCheckpointError(f"{where} is not plain data ({asked.strip()}): {_WAY_OUT}") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointCorruptError(f"{where} cannot be read: {type(error).__name__}: {error}") from error


def _refuse_compressed(source: Path | IO[bytes], where: str) -> None:
    """Torch stores its entries as they are; a compressed one grows up to a thousand times when it is read."""
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # not such an archive, or a damaged one: the reader tells
    finally:
        if not isinstance(source, Path):
            source.seek(0)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UnsafeCheckpointError(
            f"{where} holds compressed entries, which torch does not write and which may grow without limit: "
            f"{_WAY_OUT}"
        )


def is_plain(value: Any) -> bool:
    """Whether `load_object` will read a value without `trust`."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        load_object(buffer, "a value", trust=False)
    except Exception:  # whatever it is, it cannot be read back
        return False
    return True
