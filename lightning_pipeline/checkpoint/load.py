"""Reads a checkpoint: verified, staged, agreed on by all ranks, and only then applied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.fitting import Misfits, compare
from lightning_pipeline.checkpoint.layout import META, METADATA, MODEL, OURS, optimizer_key
from lightning_pipeline.checkpoint.manifest import Manifest, read_manifest, stamp_file, verify_file
from lightning_pipeline.checkpoint.optimizers import fill, names_of
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.checkpoint.reader import Reader
from lightning_pipeline.checkpoint.safe import load_object
from lightning_pipeline.errors import CheckpointCorruptError


@dataclass(frozen=True)
class Target:
    """What one rank fills from a checkpoint.

    Attributes:
        tensors: This rank's parameters and buffers, by name.
        optimizers: To fill; empty when only weights are wanted.
        names: Of this rank's parameters, by `id`.
        strict: Whether a missing or unexpected name, or another data type, is an error.
        trust: Whether objects of any class may be unpickled.
        checksums: Whether checksums are compared, where the checkpoint has them.
    """

    tensors: Mapping[str, Tensor]
    optimizers: Sequence[Optimizer]
    names: Mapping[int, str]
    strict: bool
    trust: bool
    checksums: bool


@dataclass
class Staged:
    """What was read for one rank, and is not yet in use.

    Attributes:
        tensors: By name.
        optimizers: Flat state of each.
        groups: Of each optimizer, by position; for groups that have no parameter here.
        meta: What is left for Lightning.
    """

    tensors: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    groups: list[Sequence[Any]]
    meta: dict[str, Any]


def load_folder(path: Path, target: Target, ranks: Ranks) -> dict[str, Any]:
    """Fill this rank from a checkpoint folder. Every rank calls this.

    Args:
        path: The folder, the same on every rank.
        target: What to fill.
        ranks: Of the load.

    Returns:
        `meta.pt`, with this package's part of it under `lightning_pipeline`.

    Raises:
        CheckpointCorruptError: A file is not what was written.
        UnsafeCheckpointError: A file would run code.
        CheckpointError: It does not fit the module. All of them on every rank, with nothing changed.
    """
    what = f"loading {path}"
    manifest = ranks.leader(what, lambda: read_manifest(path))
    stamps = ranks.everyone_local(what, lambda: _stamps(path, manifest))
    ranks.everyone_local(what, lambda: _verify(path, manifest, target, ranks))
    opened: list[Reader] = []

    def compare_here() -> Misfits:
        opened.append(Reader(path, trust=target.trust, stamps=stamps))
        return compare(opened[0], target.tensors, target.optimizers, target.names)

    ranks.collect(what, compare_here, lambda found: Misfits.refuse(found, path, strict=target.strict))
    staged = ranks.everyone_local(what, lambda: stage(path, opened[0], target))
    ranks.everyone_local(what, lambda: _use(staged, target, opened[0]))
    return staged.meta


def _stamps(path: Path, manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file, seen before any rank verifies them."""
    for name in (METADATA, META):
        if name not in manifest.files:
            raise CheckpointCorruptError(f"checkpoint {path} does not list {name}")
    return {name: stamp_file(path, name, manifest) for name in sorted(manifest.files)}


def _verify(path: Path, manifest: Manifest, target: Target, ranks: Ranks) -> None:
    """The ranks share the files out; with the layout that saved them, each gets the one it will read."""
    names = sorted(manifest.files, key=_by_writer) if target.checksums else ()
    for name in names[ranks.rank :: ranks.size]:
        verify_file(path, name, manifest)


def _by_writer(name: str) -> tuple[bool, int, str]:
    """`__10_0.distcp` comes after `__9_0.distcp`, and files of no rank last."""
    number = name.removeprefix("__").partition("_")[0]
    return (not number.isdecimal(), int(number) if number.isdecimal() else 0, name)


def _use(staged: Staged, target: Target, reader: Reader) -> None:
    reader.compare_again()
    apply(staged, target)
    reader.compare_again()


def stage(path: Path, reader: Reader, target: Target) -> Staged:
    """Read what one rank needs: optimizer state into new memory; weights stay in the mapped files."""
    keys = {name: f"{MODEL}.{name}" for name in target.tensors if f"{MODEL}.{name}" in reader.entries}
    first: dict[int, str] = {}
    for name in keys:
        first.setdefault(id(target.tensors[name]), name)
    wanted = {name: keys[name] for name in first.values()}
    tensors = reader.read(wanted.values(), mapped=True)
    meta = load_object(path / META, f"checkpoint file {path / META}", trust=target.trust)
    optimizers = [_stage_optimizer(reader, i, o, target.names) for i, o in enumerate(target.optimizers)]
    ranks = meta.get(OURS, {}).get("ranks") or [{"groups": []}]
    staged = {name: tensors[key] for name, key in wanted.items()}
    return Staged(staged, optimizers, ranks[-1]["groups"], meta)


def _stage_optimizer(
    reader: Reader, index: int, optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """Keys are read for this rank's parameters only."""
    own, key = set(names_of(optimizer, names)), optimizer_key(index)
    wanted = {
        entry: f"{key}.{entry}"
        for entry in reader.under(key)
        if entry.split(".", 1)[1].rpartition(".")[0] in own
    }
    found = reader.read(wanted.values())
    return {entry: found[full] for entry, full in wanted.items()}


def apply(staged: Staged, target: Target) -> None:
    """Put what was read into use."""
    with torch.no_grad():
        for name, tensor in staged.tensors.items():
            target.tensors[name].copy_(tensor)
    for index, (optimizer, flat) in enumerate(zip(target.optimizers, staged.optimizers, strict=True)):
        fill(optimizer, target.names, flat, staged.groups[index] if index < len(staged.groups) else ())
