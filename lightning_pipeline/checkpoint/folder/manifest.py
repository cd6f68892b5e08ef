"""The manifest: plain JSON that says what a checkpoint holds, written last: without it there is none."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_pipeline.checkpoint.folder import faults
from lightning_pipeline.checkpoint.folder.hashing import checksum_of
from lightning_pipeline.checkpoint.folder.mapped import stamp
from lightning_pipeline.checkpoint.folder.names import FORMAT_VERSION, MANIFEST
from lightning_pipeline.errors import CheckpointCorruptError, CheckpointError, UnsafeCheckpointError
from lightning_pipeline.settings import INTEGRITY

_LONGEST = 1 << 30  # bytes
WAY_OUT = "; use another checkpoint; `lightning-pipeline checkpoint verify` says which are whole"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: Optimizer steps taken.
        epoch: When it was saved.
        integrity: Kind of the checksums.
        files: Size in bytes and checksum of each file, by its name in the folder.
        tensors: Data type and shape of each tensor, by key.
        objects: Keys of values that are no tensors.
        topology: How the run that saved it was spread over ranks.
        versions: Of this package and the libraries.
        format_version: Of this layout.
    """

    step: int
    epoch: int
    integrity: str
    files: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Any] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    topology: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def to_bytes(manifest: Manifest) -> bytes:
    """The file's content: the fields, and a checksum over them."""
    content = asdict(manifest)
    content["checksum"] = hashlib.sha256(_text(content)).hexdigest()
    return _text(content)


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it under a temporary name, sync it, and give it its name: the commit mark."""
    faults.point("save.manifest.before")
    temporary, content = folder / f"{MANIFEST}.tmp", to_bytes(manifest)
    with temporary.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        faults.point("save.manifest.during")
        file.write(content[len(content) // 2 :])
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: There is no such folder.
        CheckpointCorruptError: There is no manifest in it, it was changed, or it is of a newer format.
    """
    path = folder / MANIFEST
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint {folder}")
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is one file, not a checkpoint folder, and so has no manifest to compare with: "
            "`ckpt_path=` and `lightning-pipeline checkpoint convert` take it"
        )
    try:
        size = look_at(folder, MANIFEST).st_size
        if size > _LONGEST:
            raise CheckpointCorruptError(f"checkpoint file {path} is damaged: it has {size} bytes{WAY_OUT}")
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointCorruptError(
            f"checkpoint {folder} has no {MANIFEST}: its save was not finished, or it was written by another "
            f"program{WAY_OUT}"
        ) from None
    except OSError as error:
        raise CheckpointCorruptError(f"checkpoint file {path} cannot be read: {error}") from error
    return parse_manifest(path, content)


def parse_manifest(path: Path, content: bytes) -> Manifest:
    """Check the content of a manifest.

    Args:
        path: For messages.
        content: Of the file.

    Raises:
        CheckpointCorruptError: It was changed, or it is of a newer format.
    """
    try:
        found = json.loads(content)
        version = found["format_version"]
        checksum = found.pop("checksum")
        whole = checksum == hashlib.sha256(_text(found)).hexdigest()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"checkpoint file {path} is damaged ({error!r}){WAY_OUT}") from None
    if not whole or content != _text({**found, "checksum": checksum}):
        raise CheckpointCorruptError(f"checkpoint file {path} is damaged: its checksum is wrong{WAY_OUT}")
    if version != FORMAT_VERSION or found.get("integrity") not in INTEGRITY:
        raise CheckpointCorruptError(
            f"checkpoint file {path} has format {version}, and this version of lightning_pipeline reads "
            f"format {FORMAT_VERSION}: use the version that wrote it, {found.get('versions')}"
        )
    _check_types(path, found)
    known = {entry.name for entry in fields(Manifest)}
    return Manifest(**{key: value for key, value in found.items() if key in known})


def _check_types(path: Path, found: Mapping[str, Any]) -> None:
    """Refuse what this program does not write, before anything follows from it."""
    kinds = {"step": int, "epoch": int, "files": dict, "tensors": dict, "objects": list, "topology": dict,
             "versions": dict}  # fmt: skip
    wrong = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
    entries = found["files"].items() if "files" not in wrong else ()
    wrong += [f"files[{name!r}]" for name, entry in entries if not _is_entry(entry)]
    if wrong:
        raise CheckpointCorruptError(
            f"checkpoint file {path} is not what this program writes, in {', '.join(wrong)}{WAY_OUT}"
        )


def _is_entry(entry: Any) -> bool:
    """Whether an entry tells size and checksum of a file."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("size"), int)
        and isinstance(entry.get("checksum"), str | None)
    )


def look_at(folder: Path, name: str) -> os.stat_result:
    """What kind of file, and how large, a name in a checkpoint is, before it is opened.

    Raises:
        UnsafeCheckpointError: It is a link, a pipe, a device or a folder.
        OSError: It cannot be looked at.
    """
    found = os.lstat(folder / name)
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeCheckpointError(
            f"checkpoint file {folder / name} is no plain file but a link, a pipe, a device or a folder: it "
            "was not opened. Do not use this checkpoint unless you know who made it"
        )
    return found


def safe_file(folder: Path, name: str) -> Path:
    """The file of a name in a checkpoint.

    Raises:
        UnsafeCheckpointError: The name leads out of the folder, or is a link.
    """
    path = folder / name
    inside = bool(name) and "\0" not in name and Path(name).name == name and name not in (".", "..")
    if not inside or path.is_symlink():
        raise UnsafeCheckpointError(
            f"checkpoint {folder} names the file {name!r}, which is a link or lies outside the folder: it "
            "was not opened. Do not use this checkpoint unless you know who made it"
        )
    return path


def stamp_file(folder: Path, name: str, manifest: Manifest) -> tuple[int, int]:
    """Compare a file's size with the manifest.

    Returns:
        Its size in bytes and the time of its last change in nanoseconds.

    Raises:
        CheckpointCorruptError: It is missing, or its size differs. Names the file.
        UnsafeCheckpointError: It lies outside the folder.
    """
    path, expected = safe_file(folder, name), manifest.files[name]["size"]
    try:
        look_at(folder, name)
        found = stamp(path)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"checkpoint file {path} is missing{WAY_OUT}") from None
    except OSError as error:
        raise CheckpointCorruptError(f"checkpoint file {path} cannot be read: {error}{WAY_OUT}") from error
    if found[0] != expected:
        raise CheckpointCorruptError(
            f"checkpoint file {path} has {found[0]} bytes instead of {expected}{WAY_OUT}"
        )
    return found


def verify_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Compare a file's size and checksum with the manifest.

    Raises:
        CheckpointCorruptError: It is missing, or its size or checksum differs. Names the file.
        UnsafeCheckpointError: It lies outside the folder.
    """
    stamp_file(folder, name, manifest)
    path, expected = folder / name, manifest.files[name]["checksum"]
    try:
        found = checksum_of(path, manifest.integrity)
    except OSError as error:
        raise CheckpointCorruptError(f"checkpoint file {path} cannot be read: {error}{WAY_OUT}") from error
    if found != expected:
        raise CheckpointCorruptError(
            f"checkpoint file {path} was changed after it was written: its {manifest.integrity} is "
            f"{found}, not {expected}{WAY_OUT}"
        )
