"""Orders for zigzag placements: one micro-batch's way down and up the ranks, repeated without collisions."""

from itertools import product

from lightning_pipeline.schedules.plans import Action, Slots, pull_warm_up
from lightning_pipeline.schedules.search.problem import Orders, Problem

_SPACINGS = ((4, 2, 2, 4), (2, 1, 1, 2), (1, 1, 1, 1), (3, 1, 3, 3), (2, 2, 2, 4), (1, 3, 3, 3))
"""Slots from one rank to the next, for forwards down and up the ranks and for backwards down and up.

The first is ZB-V's, for all the memory of 1F1B; the others hold less.
"""

_MANY = 2_000
"""Forwards of all stages from which on the first spacing that fits in the memory must do."""


def wave_orders(problem: Problem) -> list[Orders]:
    """Orders of F's and I's in which every micro-batch does what the one before did a period earlier.

    A period has a slot for each F, I and W of a rank's stages. On its way a micro-batch takes, pass by
    pass, the first slots that no earlier pass of it uses, modulo the period, on any rank. What comes
    before the first backward is then pulled as early as the memory allows.

    Source:
        The building blocks of Qi et al. 2024, arXiv 2405.15362, for any number of stages per rank.
    """
    found = []
    for spacing in _SPACINGS:
        block = _block(problem, spacing)
        if block is not None:
            orders = _repeated(problem, block)
            if orders is not None:
                found.append(orders)
        if found and problem.size > _MANY:
            break
    return found


def _block(problem: Problem, spacing: tuple[int, int, int, int]) -> dict[tuple[int, str], int] | None:
    """The slot of each (stage, kind) of micro-batch 0; None if the passes collide."""
    p, period = problem.num_ranks, 3 * problem.num_stages // problem.num_ranks
    passes = range(problem.num_stages // p)
    way = [("F", turn, spacing[turn % 2]) for turn in passes]
    way += [("I", turn, spacing[3 - turn % 2]) for turn in reversed(passes)]
    used: set[tuple[int, int]] = set()  # (rank, slot modulo period)
    block: dict[tuple[int, str], int] = {}
    begin = 0
    for kind, turn, step in way:
        stages = list(range(turn * p, (turn + 1) * p))[:: 1 if kind == "F" else -1]
        ranks = [problem.placement[stage] for stage in stages]
        for start in range(begin, begin + period):
            taken = {(rank, (start + step * i) % period) for i, rank in enumerate(ranks)}
            if not taken & used:
                break
        else:
            return None
        used |= taken
        block.update({(stage, kind): start + step * i for i, stage in enumerate(stages)})
        begin = start + step * (p - 1) + 1
    return block


def _repeated(problem: Problem, block: dict[tuple[int, str], int]) -> Orders | None:
    """The block once per micro-batch, with its warm-up pulled; None if it needs more than the memory."""
    period = 3 * problem.num_stages // problem.num_ranks
    ranks = []
    for stages in problem.local:
        slots = {
            block[stage, kind] + period * i: Action(stage, kind, i)
            for stage, kind, i in product(stages, "FI", range(problem.microbatches))
        }
        ranks.append(Slots(slots).with_weights())
    caps = [
        int((cap + 1e-9) * len(stages) / share) if share > 0 else 2 * problem.size
        for cap, share, stages in zip(problem.caps, problem.shares, problem.local, strict=True)
    ]
    if any(rank.peak() > cap for rank, cap in zip(ranks, caps, strict=True)):
        return None
    pull_warm_up(ranks, caps)
    return problem.without_weights([action for _, action in rank.in_order()] for rank in ranks)
