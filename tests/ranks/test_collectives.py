"""What ranks tell each other arrives whole."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from lightning_pipeline.errors import MessageError
from lightning_pipeline.ranks.collectives import Company
from tests.pool import Pool

Ranks = Callable[[int], Pool]


def company() -> Company:
    return Company(dist.group.WORLD, lambda what, group: nullcontext(), dist.get_rank())


def gathered(sizes: list[tuple[int, int, int]]) -> list[dict[int, bytes]]:
    rank = dist.get_rank()
    return [company().gather("a test", bytes([rank + 1]) * of_rank[rank]) for of_rank in sizes]


def test_objects_of_any_size_arrive_from_every_rank(ranks: Ranks) -> None:
    """Small ones travel with their length; one that does not fit is followed by the rest of all."""
    room = range(900, 1100)  # around the size at which they no longer fit
    sizes = [(0, 0, 0), (0, 5000, 20), (70_000, 3, 1016), *((size, 0, 2 * size) for size in room)]
    expected = [{rank: bytes([rank + 1]) * of_rank[rank] for rank in range(3)} for of_rank in sizes]
    assert ranks(3)(gathered, sizes) == [expected] * 3


def differently() -> str:
    rank = dist.get_rank()
    with pytest.raises(MessageError) as raised:
        company().gather(f"the work of rank {rank}", None)
    return str(raised.value)


def test_ranks_that_gather_for_different_things_are_told_both(ranks: Ranks) -> None:
    for text in ranks(2)(differently):
        assert "(global rank 0) in the work of rank 0; (global rank 1) in the work of rank 1" in text
