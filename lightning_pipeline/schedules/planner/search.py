"""The search for one placement: try the candidates, then improve the best."""

from typing import NamedTuple

from lightning_pipeline.schedules.costs import Costs
from lightning_pipeline.schedules.plan import Plan
from lightning_pipeline.schedules.planner.candidates import forwards_and_inputs, named_plans, orders_to_fill
from lightning_pipeline.schedules.planner.climb import climb
from lightning_pipeline.schedules.planner.gaps import Filled, fill_gaps
from lightning_pipeline.schedules.planner.problem import Orders, Problem
from lightning_pipeline.schedules.planner.zero_bubble_heuristic import zero_bubble_orders
from lightning_pipeline.schedules.simulate import peak_memory, simulate

_PATIENCE = (0.75, 1.0, 0.5, 0.25, 0.0)
_EFFORT, _MOST_TRIALS = 150_000, 250
"""What local search may cost, in actions and in moves: fixed, so that every machine finds the same plan."""

_HOPELESS = 1.15
"""An order that is this many times as long as the best one is not tried with another patience."""


class Found(NamedTuple):
    """A plan and how long it takes."""

    length: float
    plan: Plan


def best_plan(problem: Problem, costs: Costs) -> Found | None:
    """The best plan that can be found for a placement; None if nothing fits in the memory.

    Args:
        problem: Placement, sizes, memory and what to make small.
        costs: The same costs that the problem has by stage, to judge the named plans by.
    """
    named = named_plans(problem.placement, problem.num_ranks, problem.microbatches)
    found = [f for f in (_judged(problem, plan, costs) for plan in named) if f is not None]
    best: Filled | None = None
    for orders in orders_to_fill(problem, named):
        best = _filled(problem, orders, best)
    if best is not None:
        best = _climbed(problem, best)
        found.append(Found(best.length(problem), problem.plan(best.orders)))
    if problem.num_stages == problem.num_ranks:
        heuristic = [problem.plan(orders) for orders in zero_bubble_orders(problem)]
        found += [f for f in (_judged(problem, plan, costs) for plan in heuristic) if f is not None]
    return min(found, key=lambda f: f.length, default=None)


def _climbed(problem: Problem, best: Filled) -> Filled:
    """The best that local search finds from here, with W's that wait for long gaps and with others."""
    trials = min(_MOST_TRIALS, _EFFORT // problem.size)
    start = forwards_and_inputs(problem, best.orders)
    for patience in (1.0, 0.5):
        climbed = climb(problem, start, [patience] * problem.num_ranks, trials)
        best = _better(problem, best, climbed) or best
    return best


def _judged(problem: Problem, plan: Plan, costs: Costs) -> Found | None:
    peaks = peak_memory(plan, problem.costs)
    if any(peak > cap + 1e-9 for peak, cap in zip(peaks, problem.caps, strict=True)):
        return None
    simulation = simulate(plan, costs)
    return Found(simulation.makespan if problem.objective == "makespan" else simulation.span, plan)


def _filled(problem: Problem, orders: Orders, best: Filled | None) -> Filled | None:
    """The better of `best` and what an order gives with the patience that suits it."""
    for patience in _PATIENCE:
        filled = fill_gaps(problem, orders, [patience] * problem.num_ranks)
        if filled is None:
            break
        hopeless = best is not None and filled.length(problem) > _HOPELESS * best.length(problem)
        best = _better(problem, best, filled)
        if hopeless:
            break
    return best


def _better(problem: Problem, one: Filled | None, other: Filled | None) -> Filled | None:
    if one is None or other is None:
        return one or other
    return other if other.length(problem) < one.length(problem) - 1e-12 else one
