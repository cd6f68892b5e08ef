"""Orders worth trying for a placement: published ones, their relatives, and what list scheduling finds."""

from collections.abc import Iterator

from lightning_pipeline.schedules.plans import Plan, Schedule
from lightning_pipeline.schedules.rules import (
    ZBH1,
    ZBH2,
    ZBV,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    InterleavedZeroBubble,
    LoopedBFS,
    OneFOneB,
    VHalf,
    VMin,
)
from lightning_pipeline.schedules.search.list_order import TASTES, list_order
from lightning_pipeline.schedules.search.problem import Orders, Problem
from lightning_pipeline.schedules.search.waves import wave_orders
from lightning_pipeline.schedules.search.zero_bubble_heuristic import zero_bubble_orders

_EFFORT = 6_000
"""List scheduling costs about ten times as much as timing an order: larger problems get fewer tastes."""


def loop(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage when rank r holds r, r + p, r + 2p and so on."""
    return tuple(range(num_ranks)) * stages_per_rank


def zigzag(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage when stages go down the ranks and up again. Two stages per rank make a V."""
    down = tuple(range(num_ranks))
    return tuple(rank for turn in range(stages_per_rank) for rank in (down, down[::-1])[turn % 2])


def named_plans(placement: tuple[int, ...], num_ranks: int, microbatches: int) -> list[Plan]:
    """The plans of all named schedules that have this placement."""
    stages_per_rank = len(placement) // num_ranks
    schedules: list[Schedule] = []
    if placement == loop(num_ranks, 1):
        schedules += [GPipe(), OneFOneB(), ZBH1(), ZBH2()]
    if placement == loop(num_ranks, stages_per_rank):
        loops = (Interleaved1F1B, LoopedBFS, InterleavedZeroBubble)
        schedules += [schedule(stages_per_rank) for schedule in loops]
    if placement == zigzag(num_ranks, 2):
        schedules += [ZBV(), VHalf(), VMin(), DualPipeV()]
    return [schedule.plan(num_ranks, microbatches) for schedule in schedules]


def orders_to_fill(problem: Problem, named: list[Plan]) -> Iterator[Orders]:
    """Orders of F's and I's, for W's to be put into their gaps."""
    p, stages_per_rank = problem.num_ranks, problem.num_stages // problem.num_ranks
    if problem.is_loop:
        yield from _loop_orders(problem, stages_per_rank)
    if stages_per_rank > 1 and problem.placement == zigzag(p, stages_per_rank):
        yield from wave_orders(problem)
    for plan in named:
        yield problem.without_weights(plan)
    if stages_per_rank == 1:
        for orders in zero_bubble_orders(problem):
            yield forwards_and_inputs(problem, orders)
    for taste in TASTES[: max(2, _EFFORT // problem.size)]:
        listed = list_order(problem, taste)
        if listed is not None:
            yield listed


def forwards_and_inputs(problem: Problem, orders: Orders) -> Orders:
    """Orders without their W's."""
    return [[code for code in codes if code < 2 * problem.size] for codes in orders]


def _loop_orders(problem: Problem, stages_per_rank: int) -> Iterator[Orders]:
    """Interleaved orders with rounds of p micro-batches, or fewer, and warm-ups of several depths."""
    p = problem.num_ranks
    for size in _round_sizes(problem, stages_per_rank):
        for slope, more in ((1, 0), (2, 0), (2, 1)):
            warm_up = [(stages_per_rank - 1) * size + slope * (p - 1 - rank) + more for rank in range(p)]
            yield interleaved_order(problem, size, _within_memory(problem, warm_up))


def _round_sizes(problem: Problem, stages_per_rank: int) -> list[int]:
    """p, and less where p does not fit in the memory or trying costs little."""
    p = problem.num_ranks
    fits = all(cap >= p * share for cap, share in zip(problem.caps, problem.shares, strict=True))
    if stages_per_rank == 1 or (fits and problem.size > _EFFORT // 10):
        return [p]
    return sorted({max(1, p * eighths // 8) for eighths in (2, 4, 6, 8)}, reverse=True)


def _within_memory(problem: Problem, warm_up: list[int]) -> list[int]:
    """Warm-ups that leave room for one forward more, given stages of about the same size."""
    most = []
    for stages, cap, all_stages in zip(problem.local, problem.caps, problem.shares, strict=True):
        share = all_stages / len(stages)
        most.append(int((cap + 1e-9) / share) - 1 if share > 0 else len(stages) * problem.microbatches)
    return [max(0, min(pair)) for pair in zip(warm_up, most, strict=True)]


def interleaved_order(problem: Problem, size: int, warm_up: list[int]) -> Orders:
    """Rounds of `size` micro-batches: after each rank's warm-up one forward and one backward in turn."""
    m = problem.microbatches
    starts = range(0, m, size)
    orders = []
    for stages, depth in zip(problem.local, warm_up, strict=True):
        blocks = [range(start, min(start + size, m)) for start in starts]
        forwards = [s * m + i for block in blocks for s in stages for i in block]
        inputs = [problem.size + s * m + i for block in blocks for s in stages[::-1] for i in block]
        depth = min(depth, len(forwards))
        order = forwards[:depth]
        for position, code in enumerate(inputs):
            order += forwards[depth + position : depth + position + 1]
            order.append(code)
        orders.append(order)
    return orders
