"""The search: try the candidates of every placement, then improve the best."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_pipeline.schedules.plans import Costs, Plan, peak_memory, simulate
from lightning_pipeline.schedules.search.candidates import forwards_and_inputs, named_plans, orders_to_fill
from lightning_pipeline.schedules.search.climb import climb
from lightning_pipeline.schedules.search.gaps import Filled, fill_gaps
from lightning_pipeline.schedules.search.problem import Orders, Problem
from lightning_pipeline.schedules.search.zero_bubble_heuristic import zero_bubble_orders

_PATIENCE = (0.75, 1.0, 0.5, 0.25, 0.0)
_EFFORT, _MOST_TRIALS = 150_000, 250
"""What local search may cost, in actions and in moves: fixed, so that every machine finds the same plan."""

_LOOPS, _OTHERS = 1, 3
"""From how many placements' best orders local search goes on: it gains more where stages zigzag."""

_HOPELESS = 1.1
"""An order that is this many times as long as the best one is not tried with another patience."""


class Found(NamedTuple):
    """A plan and how long it takes."""

    length: float
    plan: Plan


class _Start(NamedTuple):
    """The best order of a placement, to search on from."""

    length: float
    problem: Problem
    filled: Filled


def best_plan(problems: Sequence[Problem], costs: Costs) -> Plan | None:
    """The best plan that can be found; None if nothing fits in the memory.

    Args:
        problems: One for each placement to try; those named first win a draw.
        costs: The same costs that the problems have by stage, to judge published plans by.
    """
    found: list[Found] = []
    starts: list[_Start] = []
    limit = float("inf")
    for problem in problems:
        named = named_plans(problem.placement, problem.num_ranks, problem.microbatches)
        published = named + [problem.plan(orders) for orders in _heuristic(problem)]
        found += [f for f in (_judged(problem, plan, costs) for plan in published) if f is not None]
        best: Filled | None = None
        for orders in orders_to_fill(problem, named):
            best = _filled(problem, orders, best, limit)
        if best is not None:
            limit = min(limit, best.length(problem))
            starts.append(_Start(best.length(problem), problem, best))
    starts.sort(key=lambda start: start.length)
    loops = [s for s in starts if s.problem.is_loop]
    others = [s for s in starts if not s.problem.is_loop]
    found += [_climbed(start) for start in loops[:_LOOPS] + others[:_OTHERS]]
    return min(found, key=lambda f: round(f.length, 9)).plan if found else None


def _heuristic(problem: Problem) -> list[Orders]:
    return zero_bubble_orders(problem) if problem.num_stages == problem.num_ranks else []


def _climbed(start: _Start) -> Found:
    """The best that local search finds from here, with W's that wait for long gaps and with others."""
    problem, best = start.problem, start.filled
    trials = min(_MOST_TRIALS, _EFFORT // problem.size)
    orders = forwards_and_inputs(problem, best.orders)
    for patience in (1.0, 0.5):
        climbed = climb(problem, orders, [patience] * problem.num_ranks, trials)
        if climbed is not None and climbed.length(problem) < best.length(problem):
            best = climbed
    return Found(best.length(problem), problem.plan(best.orders))


def _judged(problem: Problem, plan: Plan, costs: Costs) -> Found | None:
    peaks = peak_memory(plan, problem.costs)
    if any(peak > cap + 1e-9 for peak, cap in zip(peaks, problem.caps, strict=True)):
        return None
    simulation = simulate(plan, costs)
    return Found(simulation.makespan if problem.objective == "makespan" else simulation.span, plan)


def _filled(problem: Problem, orders: Orders, best: Filled | None, limit: float) -> Filled | None:
    """The better of `best` and what an order gives with the patience that suits it."""
    for patience in _PATIENCE:
        filled = fill_gaps(problem, orders, [patience] * problem.num_ranks)
        if filled is None:
            break
        length = filled.length(problem)
        hopeless = length > _HOPELESS * limit
        if best is None or length < best.length(problem) - 1e-12:
            best = filled
        limit = min(limit, length)
        if hopeless:
            break
    return best
