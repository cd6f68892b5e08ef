"""Fills a pipeline run from a one-file checkpoint, such as a run on one device or with DDP writes."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.contents import (
    Misfits,
    StateEntries,
    bare,
    compare,
    from_numbered,
    group_options,
    groups_of,
    groups_of_file,
    misplaced,
    names_of,
    shapes_of,
)
from lightning_pipeline.checkpoint.folder import load_object
from lightning_pipeline.checkpoint.load import Opened, Staged, Target, apply
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

Get = Callable[[str], Any]


def open_file(
    path: Path, target: Target, ranks: Ranks, order: Sequence[str], get: Get | None = None
) -> Opened:
    """Open a file, to fill this rank from it. Every rank calls this.

    Tensors stay in the file until they are copied, so that no rank holds the whole model.

    Args:
        path: Of the file, the same on every rank.
        target: What to fill. Data types may differ, as on one device.
        ranks: Of the load.
        order: All parameter names of the module.
        get: Reads the file in place of us, as a plugin does, whole on every rank.

    Raises:
        CheckpointCorruptError: It cannot be read.
        UnsafeCheckpointError: It would run code.
        CheckpointError: It does not fit the module.
    """
    what = f"loading {path}"
    checkpoint = ranks.everyone_local(what, lambda: read_file(path, trust=target.trust, get=get))
    states = checkpoint.pop("state_dict")
    optimizer_states = checkpoint.pop("optimizer_states", None)

    def finish(edited: Mapping[str, Any] | None, target: Target) -> None:
        given = states if edited is None else edited

        def refuse(found: list[tuple[Misfits, list[Any]]]) -> None:
            try:
                Misfits.refuse([misfits for misfits, _ in found], path, strict=target.strict)
            except CheckpointError as error:
                told = [later for _, later in found]
                more = _misfits_later(path, optimizer_states or [], target, told, order)
                raise CheckpointError(". ".join([str(error), *more])) from None

        if target.weights:
            ranks.collect(what, lambda: (_compared(given, target), _told(target.later, target.names)), refuse)
        groups = ranks.everyone(what, lambda: _told(target.optimizers, target.names))
        staged = ranks.everyone_local(
            what, lambda: _stage(path, optimizer_states, given, target, groups, order)
        )
        ranks.everyone_local(what, lambda: apply(staged, target))

    return Opened(checkpoint, lambda: dict(states), finish, target, optimizer_states)


def _told(optimizers: Sequence[Any], names: Mapping[int, str]) -> list[Any]:
    """What the others must know of each optimizer: its groups, and its parameters' shapes."""
    return [(groups_of(bare(one), names), shapes_of(bare(one), names)) for one in optimizers]


def _misfits_later(
    path: Path, states: Sequence[Any], target: Target, groups: Sequence[Sequence[Any]], order: Sequence[str]
) -> list[str]:
    """What does not fit the optimizers as they are now, which are filled later."""
    found = []
    for index, optimizer in enumerate(target.later if states else ()):
        try:
            _groups(path, states, index, bare(optimizer), groups, order)
        except CheckpointError as error:
            found.append(f"Nor do optimizers fit: {error}")
    return found


def _groups(
    path: Path, states: Sequence[Any], index: int, optimizer: Optimizer, told: Sequence[Sequence[Any]],
    order: Sequence[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """The groups of an optimizer in the order of the file, by what each rank has told of it."""
    try:
        shapes = {name: shape for rank in told for name, shape in rank[index][1].items()}
        fits = partial(misplaced, optimizer, shapes)
        return groups_of_file(states[index], [rank[index][0] for rank in told], order, fits)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"optimizer {index} of checkpoint file {path} does not fit this run's: {error}"
        ) from error


def read_file(path: Path, *, trust: bool, get: Get | None = None) -> dict[str, Any]:
    """A one-file checkpoint, whose tensors stay in the file until they are used.

    Args:
        path: Of the file.
        trust: Whether objects of any class may be unpickled.
        get: Reads it in place of us, as a plugin does.

    Raises:
        CheckpointError: It cannot be read.
    """
    if get is not None:
        found = get(str(path))
    elif not path.exists():
        raise CheckpointNotFoundError(f"Checkpoint file not found: {path}")  # as Lightning says it
    elif not path.is_file():
        raise CheckpointCorruptError(f"checkpoint {path} is no plain file, nor a folder: it was not opened")
    else:
        found = load_object(path, f"checkpoint file {path}", trust=trust, mmap=True)
    if not isinstance(found, dict) or "state_dict" not in found:
        raise CheckpointCorruptError(f"checkpoint file {path} has no state_dict: Lightning did not write it")
    return found


def _compared(states: Mapping[str, Any], target: Target) -> Misfits:
    misfits = compare(StateEntries(states), target.tensors, [], target.names)
    misfits.stored.update(states)
    misfits.expected.update(target.extra)
    misfits.dtypes.clear()
    return misfits


def _stage(
    path: Path,
    states: Sequence[Any] | None,
    given: Mapping[str, Any],
    target: Target,
    groups: Sequence[Sequence[Any]],
    order: Sequence[str],
) -> Staged:
    own = {name: given[name] for name in target.tensors if name in given}
    optimizers: list[dict[str, Any]] = []
    if states is None and target.optimizers:
        raise CheckpointError(
            f"checkpoint file {path} has weights only, and fit(ckpt_path=...) goes on with an optimizer's "
            "state: load the weights into the module with load_from_checkpoint, and fit without ckpt_path"
        )
    states = states or []
    stored: list[Sequence[Any]] = [
        [{"options": group_options(group)} for group in state["param_groups"]] for state in states
    ]
    for index, optimizer in enumerate(target.optimizers):
        flat = from_numbered(states[index], _groups(path, states, index, bare(optimizer), groups, order))
        optimizers.append(_own(flat, set(names_of(bare(optimizer), target.names))))
    return Staged(own, optimizers, stored, _extra_of(given, target))


def _extra_of(states: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Extra state of modules, as copies: modules keep what they are given, and the file is mapped."""
    own = {name: states[name] for name in target.extra if name in states}
    return {
        name: value.clone() if isinstance(value, Tensor) else deepcopy(value) for name, value in own.items()
    }


def _own(flat: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The entries of this rank's parameters, as copies: the file is mapped into memory."""
    own = {k: value for k, value in flat.items() if k.split(".", 1)[1].rpartition(".")[0] in names}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()}
