"""A checkpoint made to do harm does none: nothing of it runs, and no file outside is opened."""

import hashlib
import io
import json
import os
import pickle
import zipfile
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from lightning_pipeline.checkpoint.contents.meta_file import as_bytes
from lightning_pipeline.checkpoint.folder import manifest as manifests
from lightning_pipeline.checkpoint.folder.hashing import checksum_of
from lightning_pipeline.checkpoint.folder.safe import read_metadata
from lightning_pipeline.errors import CheckpointCorruptError, UnsafeCheckpointError
from tests.checkpoint_parts import load, save


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def seal(folder: Path) -> None:
    """Make sizes and checksums right, as who wants to do harm would."""
    content = json.loads((folder / "manifest.json").read_bytes())
    content.pop("checksum")
    for path in folder.iterdir():
        if path.name != "manifest.json":
            content["files"][path.name] = {
                "size": path.stat().st_size,
                "checksum": checksum_of(path, "sha256"),
            }
    (folder / "manifest.json").write_bytes(manifests.to_bytes(manifests.Manifest(**content)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    return path


def refused(folder: Path, match: str) -> None:
    seal(folder)
    with pytest.raises(UnsafeCheckpointError, match=match):
        load(folder, 2)[2]()
    assert not (folder.parent / "ran").exists()


def test_code_in_the_metadata_does_not_run(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(folder.parent / "ran")))
    refused(folder, r"\.metadata asks for .*open.*trust_checkpoint=True")


def test_code_in_meta_does_not_run(folder: Path) -> None:
    (folder / "meta.pt").write_bytes(as_bytes({"hyper_parameters": Evil(folder.parent / "ran")}))
    refused(folder, r"meta\.pt is not plain data")


class OldPickler(pickle.Pickler):
    """Writes members of enumerations as Python before 3.11.4 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_an_older_python_is_read(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / ".metadata").open("wb") as file:
        OldPickler(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_metadata(folder, trust=False) == metadata


@pytest.mark.parametrize("what", [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")])
def test_no_other_attribute_is_taken(folder: Path, what: tuple[Any, str]) -> None:
    class Asks:
        def __reduce__(self) -> Any:
            return getattr, what

    (folder / ".metadata").write_bytes(pickle.dumps(Asks()))
    with pytest.raises(UnsafeCheckpointError, match=r"asks for builtins\.getattr of <"):
        read_metadata(folder, trust=False)


def change_metadata(folder: Path, change: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_code_in_an_object_entry_does_not_run(folder: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Evil(folder.parent / "ran"), buffer)
    shard = folder / "__0_0.distcp"
    start = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + buffer.getvalue())

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "optimizer_0.param_groups.layer0.bias.lr":
                info.offset, info.length = start, len(buffer.getvalue())

    change_metadata(folder, change)
    refused(folder, r"optimizer_0\.param_groups\.layer0\.bias\.lr.* is not plain data")


@pytest.mark.parametrize("path", ["../b.ckpt/__0_0.distcp", "/etc/hostname", ".."])
def test_paths_out_of_the_folder_are_not_followed(folder: Path, path: str) -> None:
    def change(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = path

    change_metadata(folder, change)
    refused(folder, "lies outside the folder")


def test_links_are_not_followed(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")
    refused(folder, "is a link")


def test_trust_opts_out(folder: Path) -> None:
    (folder / "meta.pt").write_bytes(as_bytes({"hyper_parameters": Evil(folder.parent / "ran")}))
    seal(folder)
    load(folder, 2, trust=True)[2]()
    assert (folder.parent / "ran").exists()


def reseal(folder: Path, **changes: Any) -> None:
    """Change the manifest, with a checksum that is right."""
    content = json.loads((folder / "manifest.json").read_bytes())
    content.pop("checksum")
    content.update(changes)
    content = {name: value for name, value in content.items() if value is not None}
    content["checksum"] = hashlib.sha256(manifests._text(content)).hexdigest()
    (folder / "manifest.json").write_bytes(manifests._text(content))


def test_a_manifest_that_is_a_pipe_or_a_device_is_not_opened(folder: Path) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        path = folder / "manifest.json"
        path.unlink() if not path.is_dir() else path.rmdir()
        make(path)
        with pytest.raises(UnsafeCheckpointError, match="no plain file"):
            load(folder, 2)[2]()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"step": "one"}, "in step"),
        ({"step": None}, "in step"),
        ({"files": {"meta.pt": {}}}, r"in files\['meta.pt'\]"),
        ({"files": [1]}, "in files"),
        ({"versions": 3}, "in versions"),
    ],
)
def test_a_manifest_of_other_types_is_refused(folder: Path, changes: dict[str, Any], match: str) -> None:
    reseal(folder, **changes)
    with pytest.raises(CheckpointCorruptError, match=match):
        load(folder, 2)[2]()


def test_a_manifest_that_nests_without_end_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointCorruptError, match="damaged"):
        load(folder, 2)[2]()


def test_a_name_with_a_null_is_refused(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_bytes())["files"]
    reseal(folder, files={**content, "a\0b": {"size": 1, "checksum": "0"}})
    with pytest.raises(UnsafeCheckpointError, match="outside the folder"):
        load(folder, 2)[2]()


@pytest.mark.parametrize(
    ("meta", "match"),
    [([1], "all of it"), ({"loops": {"fit_loop": 3}}, "fit_loop"), ({"lr_schedulers": 1}, "lr_schedulers"),
     ({"lightning_pipeline": {"ranks": [1]}}, "ranks")],
)  # fmt: skip
def test_a_meta_file_of_other_types_is_refused_before_anything_is_touched(
    folder: Path, meta: Any, match: str
) -> None:
    torch.save(meta, folder / "meta.pt")
    seal(folder)
    with pytest.raises(CheckpointCorruptError, match=match):
        load(folder, 2)[2]()


def test_compressed_entries_are_refused(folder: Path) -> None:
    stored = zipfile.ZipFile(folder / "meta.pt")
    with zipfile.ZipFile(folder / "other", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in stored.namelist():
            archive.writestr(name, stored.read(name))
    (folder / "other").rename(folder / "meta.pt")
    refused(folder, "compressed entries")


def test_a_file_that_the_manifest_does_not_list_is_not_read(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_bytes())["files"]
    shard = next(name for name in content if name.endswith(".distcp"))
    reseal(folder, files={name: entry for name, entry in content.items() if name != shard})
    with pytest.raises(CheckpointCorruptError, match="does not list"):
        load(folder, 2)[2]()
