"""Who has which weights once a run has ended."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.ranks import Company
from lightning_pipeline.weights.transfer import once, transfer


def gather_weights(
    company: Company, own: Mapping[str, Tensor], held: Mapping[str, Tensor], *, everything: bool
) -> dict[str, Tensor]:
    """After a run: the weights that this rank is to have and has not; all ranks of a replica call.

    Args:
        company: The ranks of the replica.
        own: On the CPU: what this rank has the true values of, by name.
        held: On the CPU: all that it has. Copies of what other ranks own are brought up to date.
        everything: Whether this rank gets the whole module.

    Returns:
        By name, what it did not hold; empty unless it gets the whole.
    """
    came: dict[str, Tensor] = {}
    offered = once(own)

    def wants(names: Any) -> set[str]:
        return {name for name in names if everything or name in held}

    def put(name: str, tensor: Tensor) -> None:
        if name not in held:
            came[name] = tensor
        elif held[name] is not own.get(name):  # a copy of what another stage owns may be behind
            with torch.no_grad():
                held[name].copy_(tensor)

    transfer(company, "gathering weights", offered, wants, put)
    return came


def receives_all(how: str, global_rank: int, *, staged: bool) -> bool:
    """Whether a rank has the whole module after a run.

    Args:
        how: `PipelineStrategy(gather_weights=...)`.
        global_rank: Of the rank.
        staged: Whether ranks built their own stages only.
    """
    if how == "auto":
        return not staged
    return how == "all" or (how == "rank_zero" and global_rank == 0)
