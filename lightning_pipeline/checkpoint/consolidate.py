"""Turns a checkpoint folder into one file that needs no pipeline. Runs in one process, without a group."""

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.checkpoint.contents import read_meta, schedulers_for, to_numbered, whole_groups
from lightning_pipeline.checkpoint.folder import (
    META,
    METADATA,
    MODEL,
    OURS,
    Manifest,
    Reader,
    check_kinds,
    optimizer_key,
    read_manifest,
    stamp_file,
    verify_file,
    write_tensors,
)
from lightning_pipeline.errors import CheckpointError


def verify(folder: Path, progress: Callable[[str, int, int], None] = lambda what, done, of: None) -> Manifest:
    """Check every file of a checkpoint against its manifest.

    Args:
        folder: The checkpoint.
        progress: Told what is done, how many bytes of it, and of how many.

    Raises:
        CheckpointError: A file is missing, has another size or checksum. All such files are named.
    """
    manifest = read_manifest(folder)
    for name in (METADATA, META):
        if name not in manifest.files:
            raise CheckpointError(f"checkpoint {folder} does not list {name}")
    wrong: list[CheckpointError] = []
    done, of = 0, sum(entry["size"] for entry in manifest.files.values())
    for name, entry in manifest.files.items():
        progress("verifying", done, of)
        try:
            verify_file(folder, name, manifest)
        except CheckpointError as error:
            wrong.append(error)
        done += entry["size"]
    progress("verifying", done, of)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        told = "\n  - ".join(str(error) for error in wrong)
        raise type(wrong[0])(f"{len(wrong)} of {len(manifest.files)} files are not as written:\n  - {told}")
    return manifest


def to_file(folder: Path, file: Path, *, trust: bool, position: bool = False) -> None:
    """Write a one-file checkpoint as a run on one device would: weights, optimizers, and the rest.

    Tensors are written out of the mapped files of the checkpoint, so that memory may stay smaller than the
    model. Where files cannot be mapped, they pass through scratch files beside `file`.

    Args:
        folder: The checkpoint.
        file: New or replaced.
        trust: Whether objects of any class may be unpickled.
        position: Whether where the run stood in its data is written, too, under this package's key.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    reader = _verified(folder, trust=trust)
    checkpoint, own = _read(folder, reader, file, trust=trust)
    if position and own.get("replicas"):
        checkpoint[OURS] = {"replicas": own["replicas"]}
    _replace(file, reader, lambda temporary: torch.save(checkpoint, temporary))


def read_whole(folder: Path, *, trust: bool) -> dict[str, Any]:
    """What `to_file` would write, with tensors that stay in the files until they are used.

    Args:
        folder: The checkpoint.
        trust: Whether objects of any class may be unpickled.

    Returns:
        The checkpoint, and where the run stood in its data under this package's key.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    reader = _verified(folder, trust=trust)
    checkpoint, own = _read(folder, reader, Path(tempfile.gettempdir()) / "lightning_pipeline", trust=trust)
    reader.compare_again()
    checkpoint[OURS] = {"replicas": own.get("replicas")}
    return checkpoint


def _read(
    folder: Path, reader: Reader, beside: Path, *, trust: bool
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    tensors = _Mapped(reader, beside)
    checkpoint = read_meta(folder, trust=trust, state=lambda name: tensors.get(f"{MODEL}.{name}"))
    own = checkpoint.pop(OURS, {})
    stored = reader.under(MODEL)
    names = dict.fromkeys([*(name for name in own.get("listed", ()) if name in stored), *stored])
    states = {name: tensors.get(f"{MODEL}.{name}") for name in names}  # in the order of one device
    checkpoint["state_dict"] = {**states, **own.get("extra", {})}
    if "lr_schedulers" in checkpoint:
        checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = _training_state(reader, tensors, own)
    return checkpoint, own


def _verified(folder: Path, *, trust: bool) -> Reader:
    manifest = read_manifest(folder)
    stamps = {name: stamp_file(folder, name, manifest) for name in manifest.files}
    verify(folder)
    return Reader(folder, trust=trust, stamps=stamps)


def _training_state(
    reader: Reader, tensors: "_Mapped", own: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    ranks, order = own["ranks"], own["order"]
    groups = [
        whole_groups([rank["groups"][index] for rank in ranks], order)
        for index in range(len(ranks[0]["groups"]))
    ]
    states = []
    for index, merged in enumerate(groups):
        key = optimizer_key(index)
        flat = {entry: tensors.get(f"{key}.{entry}") for entry in reader.under(key)}
        states.append(to_numbered(flat, merged))
    return states, schedulers_for(ranks, groups, own["schedulers"])


class _Mapped:
    """Entries of a checkpoint; large tensors are mapped files: its own, or scratch files without a name."""

    def __init__(self, reader: Reader, beside: Path) -> None:
        self._reader, self._beside = reader, beside
        self._places: dict[Any, Tensor] = {}

    def get(self, key: str) -> Any:
        """A tensor, the same one for tied names; or a value."""
        place = self._reader.place_of(key)
        if place not in self._places:
            value = self._reader.read([key], place=self._new, mapped=True)[key]
            if not isinstance(value, Tensor):
                return value
            self._places[place] = value
        return self._places[place]

    def _new(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        count = size.numel()
        if count * dtype.itemsize < 1 << 16:
            return torch.empty(size, dtype=dtype)
        scratch = self._beside.with_name(f"{self._beside.name}.{secrets.token_hex(4)}.tmp")
        try:
            return torch.from_file(str(scratch), shared=True, size=count, dtype=dtype).view(size)
        finally:
            scratch.unlink(missing_ok=True)


def _replace(file: Path, reader: Reader, write: Callable[[Path], None]) -> None:
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        reader.compare_again()
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def to_safetensors(folder: Path, file: Path) -> None:
    """Write the weights as safetensors, tensor after tensor; further names of tied ones go to its metadata.

    Args:
        folder: The checkpoint.
        file: New or replaced.

    Raises:
        CheckpointError: The folder cannot be read, or a data type has no name in that format.
    """
    reader = _verified(folder, trust=False)
    kept, ties = _once(reader)
    entries = {name: reader.entries[f"{MODEL}.{name}"] for name in kept}
    shapes = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}
    check_kinds(shapes)

    def get(name: str) -> Tensor:
        key = f"{MODEL}.{name}"
        found: Tensor = reader.read([key], mapped=True)[key]
        return found

    def write(temporary: Path) -> None:
        write_tensors(temporary, shapes, get, {"format": "pt", **ties})

    _replace(file, reader, write)


def _once(reader: Reader) -> tuple[list[str], dict[str, str]]:
    """Names by which each tensor is written, and the further names."""
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for name in reader.under(MODEL):
        known = first.setdefault(reader.place_of(f"{MODEL}.{name}"), name)
        if known != name:
            ties[name] = known
    return list(first.values()), ties
