"""Replicas, and stages that share a parameter, begin with the same values."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.model.state import SharedParameter
from lightning_pipeline.ranks import Groups
from lightning_pipeline.schedules import Plan


def start_equal(
    tensors: Iterable[Tensor], shared: Iterable[SharedParameter], groups: Groups, placement: Plan
) -> None:
    """Give replicas, and stages that share a parameter, the same values, seeded or not.

    Args:
        tensors: All that this rank holds, in the order of the other replicas.
        shared: Parameters of several stages.
        groups: Of the ranks.
        placement: Which rank holds which stage.
    """
    if groups.data_parallel is not None and groups.data_parallel.size() > 1:
        source = groups.numbering.global_rank(groups.rank, 0)
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=source, group=groups.data_parallel)
    for one in shared:
        group = groups.shared(one.stages, placement)
        if one.parameter is not None and group is not None:
            source = groups.numbering.global_rank(placement.rank_of(one.stages[0]), groups.replica)
            dist.broadcast(one.parameter.detach(), src=source, group=group)
