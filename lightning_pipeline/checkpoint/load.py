"""Reads a checkpoint: verified, staged, agreed on by all ranks, and only then applied."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.contents import Misfits, StateEntries, compare, fill, names_of, read_meta
from lightning_pipeline.checkpoint.folder import (
    META,
    METADATA,
    MODEL,
    OURS,
    Manifest,
    Reader,
    optimizer_key,
    read_manifest,
    stamp_file,
    verify_file,
)
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.errors import CheckpointCorruptError, CheckpointError


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
        extra: Names of the extra state of modules that this rank has.
        load_extra: Gives modules their extra state, by name.
        weights: Whether tensors and extra state are to be filled, too.
        later: Optimizers that are filled once hooks have run: told of where weights do not fit.
    """

    tensors: Mapping[str, Tensor]
    optimizers: Sequence[Optimizer]
    names: Mapping[int, str]
    strict: bool
    trust: bool
    checksums: bool
    extra: Collection[str] = ()
    load_extra: Callable[[Mapping[str, Any]], None] = lambda _: None
    weights: bool = True
    later: Sequence[Optimizer] = ()

    def of_optimizers(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> "Target":
        """To fill these, and nothing else."""
        return replace(self, tensors={}, extra=(), optimizers=optimizers, names=names, weights=False)


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was verified, and of which nothing is in use yet.

    Attributes:
        meta: What is no tensor of model or optimizers.
        states: Reads the whole `state_dict`, to be edited; large tensors stay in the file until used.
        finish: Compares, and puts it into use; every rank calls it. With the edited `state_dict`, or `None`,
            and what to fill, as a whole or a part after the other.
        target: What it was opened for.
        optimizers: States of optimizers in a file, as one device has them; None in a folder.
    """

    meta: dict[str, Any]
    states: Callable[[], dict[str, Any]]
    finish: Callable[[Mapping[str, Any] | None, Target], None]
    target: Target
    optimizers: Sequence[Mapping[str, Any]] | None = None

    def apply(self, states: Mapping[str, Any] | None = None, target: Target | None = None) -> None:
        """Compare on all ranks, and put it into use.

        Args:
            states: The edited `state_dict`; default: as it is stored.
            target: What to fill, where hooks have put other tensors there; default: what it was opened for.

        Raises:
            CheckpointError: On every rank, with nothing changed.
        """
        self.finish(states, target or self.target)

    def apply_by(self, load: Callable[[], object], what: str, ranks: Ranks) -> None:
        """Let the user's code put the `state_dict` into use.

        Args:
            load: Does so, on this rank.
            what: Is done, for messages.
            ranks: Of the load.

        Raises:
            CheckpointError: On every rank: it does not fit, or that code failed.
        """

        def loaded() -> None:
            try:
                load()
            except RuntimeError as error:  # torch's
                raise CheckpointError(str(error)) from error

        ranks.everyone_local(what, loaded)
        self.finish(None, replace(self.target.of_optimizers((), {}), load_extra=lambda _: None))

    def apply_optimizers(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        """Compare and fill optimizers, where it was opened for none.

        Args:
            optimizers: Of this rank.
            names: Of its parameters, by `id`.

        Raises:
            CheckpointError: On every rank, with nothing more changed.
        """
        self.finish(None, self.target.of_optimizers(optimizers, names))


def read_rest(path: Path, *, trust: bool) -> dict[str, Any]:
    """What stands in a folder beside the tensors of model and optimizers, verified.

    Args:
        path: The folder.
        trust: Whether objects of any class may be unpickled.

    Raises:
        CheckpointError: It cannot be read.
    """
    verify_file(path, META, read_manifest(path))
    return read_meta(path, trust=trust)


@dataclass
class Staged:
    """What was read for one rank, and is not yet in use.

    Attributes:
        tensors: By name.
        optimizers: Flat state of each.
        groups: Of each optimizer, by position; for groups that have no parameter here.
        extra: Extra state of modules, by name.
    """

    tensors: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    groups: list[Sequence[Any]]
    extra: Mapping[str, Any]


def load_folder(path: Path, target: Target, ranks: Ranks) -> dict[str, Any]:
    """Fill this rank from a checkpoint folder; see `open_folder`.

    Returns:
        `meta.pt`, with this package's part of it under `lightning_pipeline`.
    """
    opened = open_folder(path, target, ranks)
    opened.apply()
    return opened.meta


def open_folder(path: Path, target: Target, ranks: Ranks, *, editable: bool = False) -> Opened:
    """Verify a checkpoint folder, to fill this rank from it. Every rank calls this.

    Args:
        path: The folder, the same on every rank.
        target: What to fill.
        ranks: Of the load.
        editable: Whether the `state_dict` may be edited before.

    Raises:
        CheckpointCorruptError: A file is not what was written.
        UnsafeCheckpointError: A file would run code.
        CheckpointError: It does not fit the module. All of them on every rank, with nothing changed.
    """
    what = f"loading {path}"
    manifest = ranks.leader(what, lambda: read_manifest(path))
    stamps = ranks.everyone_local(what, lambda: _stamps(path, manifest))
    ranks.everyone_local(what, lambda: _verify(path, manifest, target, ranks))

    def open_here() -> tuple[Reader, dict[str, Any]]:
        reader = Reader(path, trust=target.trust, stamps=stamps, editable=editable)
        return reader, read_meta(path, trust=target.trust)

    reader, meta = ranks.everyone_local(what, open_here)
    extra = meta.get(OURS, {}).get("extra", {})

    given: dict[str, Any] = {}

    def states() -> dict[str, Any]:
        keys = {name: f"{MODEL}.{name}" for name in reader.under(MODEL)}
        given.update(ranks.everyone_local(what, lambda: _read_states(reader, keys)))
        return {**given, **extra}

    def finish(edited: Mapping[str, Any] | None, target: Target) -> None:
        edited = None if edited is None else _cast(edited, given, target)

        def compare_here() -> Misfits:
            entries = reader if edited is None else StateEntries(edited, reader)
            tensors = target.tensors if target.weights else None
            misfits = compare(entries, tensors, target.optimizers, target.names)
            if target.weights:
                misfits.stored.update(extra if edited is None else edited)
                misfits.expected.update(target.extra)
                misfits.later = compare(entries, None, target.later, target.names)
            return misfits

        ranks.collect(what, compare_here, lambda found: Misfits.refuse(found, path, strict=target.strict))
        staged = ranks.everyone_local(what, lambda: stage(reader, meta, target, edited))
        ranks.everyone_local(what, lambda: _use(staged, target, reader))

    return Opened(meta, states, finish, target)


def _cast(edited: Mapping[str, Any], given: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Tensors that the user put in get the data type of what they are for, as on one device."""
    return {
        name: value.to(target.tensors[name].dtype)
        if isinstance(value, Tensor) and name in target.tensors and value is not given.get(name)
        else value
        for name, value in edited.items()
    }


def _read_states(reader: Reader, keys: Mapping[str, str]) -> dict[str, Any]:
    """Each tensor once, also where it has several names."""
    once: dict[Any, str] = {}
    first = {name: once.setdefault(reader.place_of(key), key) for name, key in keys.items()}
    found = reader.read(once.values(), mapped=True)
    return {name: found[key] for name, key in first.items()}


def _stamps(path: Path, manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file, seen before any rank verifies them."""
    for name in (METADATA, META):
        if name not in manifest.files:
            raise CheckpointCorruptError(f"checkpoint {path} does not list {name}")
    return {name: stamp_file(path, name, manifest) for name in sorted(manifest.files)}


def _verify(path: Path, manifest: Manifest, target: Target, ranks: Ranks) -> None:
    """The ranks share the files out; with the layout that saved them, each gets the one it will read.

    What all ranks read, all verify: a file system of the network may show one of them an older file.
    """
    names = sorted(manifest.files, key=_by_writer) if target.checksums else []
    for name in {*names[ranks.rank :: ranks.size], *{METADATA, META}.intersection(names)}:
        verify_file(path, name, manifest)


def _by_writer(name: str) -> tuple[bool, int, str]:
    """`__10_0.distcp` comes after `__9_0.distcp`, and files of no rank last."""
    number = name.removeprefix("__").partition("_")[0]
    return (not number.isdecimal(), int(number) if number.isdecimal() else 0, name)


def _use(staged: Staged, target: Target, reader: Reader) -> None:
    reader.compare_again()
    apply(staged, target)
    reader.compare_again()


def stage(
    reader: Reader, meta: Mapping[str, Any], target: Target, edited: Mapping[str, Any] | None = None
) -> Staged:
    """Read what one rank needs: optimizer state into new memory; weights stay in the mapped files.

    Args:
        reader: Of the checkpoint.
        meta: Its `meta.pt`.
        target: What to fill.
        edited: The `state_dict` that the user was given, where there was one.
    """
    own = meta.get(OURS, {})
    if edited is None:
        keys = {name: f"{MODEL}.{name}" for name in target.tensors if f"{MODEL}.{name}" in reader.entries}
        first: dict[int, str] = {}
        for name in keys:
            first.setdefault(id(target.tensors[name]), name)
        tensors = reader.read((keys[name] for name in first.values()), mapped=True)
        found = {name: tensors[keys[name]] for name in first.values()}
        extra: Mapping[str, Any] = {**own.get("extra", {}), **_extra_tensors(reader, target)}
    else:
        found, extra = {name: edited[name] for name in target.tensors if name in edited}, edited
    optimizers = [_stage_optimizer(reader, i, o, target.names) for i, o in enumerate(target.optimizers)]
    for name, tensor in found.items():
        if isinstance(tensor, Tensor) and tensor.layout != target.tensors[name].layout:
            raise CheckpointError(f"{name} is stored as {tensor.layout}, and the module has it otherwise")
    ranks = own.get("ranks") or [{"groups": []}]
    return Staged(found, optimizers, ranks[-1]["groups"], extra)


def _extra_tensors(reader: Reader, target: Target) -> dict[str, Tensor]:
    """Extra state that is a tensor, in memory of its own: modules keep what they are given."""
    keys = {f"{MODEL}.{name}": name for name in target.extra if f"{MODEL}.{name}" in reader.entries}
    return {keys[key]: value for key, value in reader.read(keys).items()}


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
    target.load_extra(staged.extra)
    for index, (optimizer, flat) in enumerate(zip(target.optimizers, staged.optimizers, strict=True)):
        fill(optimizer, target.names, flat, staged.groups[index] if index < len(staged.groups) else ())
