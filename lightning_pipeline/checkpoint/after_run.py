"""Saves after a run has ended, when no group is left and each rank holds the whole module or its stages."""

from collections.abc import Mapping, Sequence
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
    joined = dist.is_initialized()
    state = _own_part(dumped["state_dict"], joined)
    store = None
    if joined and dist.group.WORLD is not None:
        store = PrefixStore(f"lightning_pipeline/after/{path}", dist.group.WORLD.get_group_store())
    options = replace(options, in_background=False)
    checkpoints = Checkpoints(options, numbering, store)
    held = Holdings(
        tensors=state, optimizers=optimizers, names=names, schedulers=schedulers, order=order,
        parameters=set(order), owned=set(names.values()), extra=set(), load_extra=lambda values: None,
        position=lambda: stood, topology={"ranks": numbering.num_ranks}, objects=objects, put=put,
    )  # fmt: skip
    try:
        checkpoints.save(path, {**dumped, "state_dict": state}, held)
    finally:
        checkpoints.close(failed=False)


def _own_part(states: Mapping[str, Any], joined: bool) -> dict[str, Any]:
    """What this rank writes: each entry is written by the first rank that has its values."""
    own = {name: v for name, v in states.items() if not (isinstance(v, Tensor) and v.is_meta)}
    if not joined:
        return own
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, set(own))
    taken: set[str] = set().union(*found[: dist.get_rank()])
    return {name: value for name, value in own.items() if name not in taken}
