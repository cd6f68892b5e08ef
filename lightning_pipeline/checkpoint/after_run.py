"""Saves after a run has ended, when no group is left and each rank holds the whole module or its stages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.one_file import Put
from lightning_pipeline.checkpoint.run import Checkpoints, Holdings, Options
from lightning_pipeline.ranks import Numbering


def save_whole(
    path: Path,
    dumped: Mapping[str, Any],
    options: Options,
    numbering: Numbering,
    optimizers: Sequence[Optimizer],
    names: Mapping[int, str],
    schedulers: Sequence[int],
    order: Sequence[str],
    stood: Mapping[str, Any] | None,
    objects: Sequence[tuple[tuple[str, ...], bytes]] = (),
    put: Put | None = None,
) -> None:
    """Write a checkpoint: every rank its part of the optimizers, and of the module what no rank before has.

    Args:
        path: The folder.
        dumped: What Lightning dumped, with the module's `state_dict`; what is on the meta device is left out.
        options: Of the strategy; it is written before this returns.
        numbering: Of the run that ended.
        optimizers: With this rank's parameters.
        names: Of the parameters whose state this rank writes, by `id`.
        schedulers: The optimizer of each LR scheduler, by index.
        order: All parameter names of the module.
        stood: Where this replica stood in its data when the run ended.
        objects: What was pickled already, and where it stands in what Lightning dumps.
        put: Saves one-file checkpoints in place of us, as a plugin does.

    Raises:
        CheckpointWriteError: It was not written.
    """
    state = first_holders(dumped["state_dict"])
    held = Holdings(
        tensors=state, optimizers=optimizers, names=names, schedulers=schedulers, order=order,
        parameters=set(order), owned=set(names.values()), extra=set(), load_extra=lambda values: None,
        position=lambda: stood, topology={"ranks": numbering.num_ranks}, objects=objects, put=put,
        listed=list(dumped["state_dict"]),
    )  # fmt: skip
    with outside_a_run(path, options, numbering) as checkpoints:
        checkpoints.save(path, {**dumped, "state_dict": state}, held)


@contextmanager
def outside_a_run(path: Path, options: Options, numbering: Numbering) -> Iterator[Checkpoints]:
    """What saves and loads where no run has its own; all ranks enter.

    Args:
        path: Of what is saved or loaded.
        options: Of the strategy; what is written is there at the end.
        numbering: Of the run that ended.
    """
    store = None
    if dist.is_initialized() and dist.group.WORLD is not None:
        store = PrefixStore(f"lightning_pipeline/after/{path}", dist.group.WORLD.get_group_store())
    checkpoints = Checkpoints(replace(options, in_background=False), numbering, store)
    try:
        yield checkpoints
    finally:
        checkpoints.close(failed=False)


def first_holders(states: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank writes of a `state_dict`: each entry is the first rank's that has its values."""
    own = {name: v for name, v in states.items() if not (isinstance(v, Tensor) and v.is_meta)}
    if not dist.is_initialized():
        return own
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, set(own))
    taken: set[str] = set().union(*found[: dist.get_rank()])
    return {name: value for name, value in own.items() if name not in taken}
