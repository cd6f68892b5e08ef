"""The search for one placement: try the candidates, then improve the best."""

from typing import NamedTuple

from lightning_pipeline.schedules.costs import Costs
from lightning_pipeline.schedules.plan import Plan
from lightning_pipeline.schedules.planner.candidates import named_plans, orders_to_fill
from lightning_pipeline.schedules.planner.gaps import Filled, fill_gaps
from lightning_pipeline.schedules.planner.problem import Orders, Problem
from lightning_pipeline.schedules.simulate import simulate

_PATIENCE = (1.0, 0.75, 0.5, 0.25, 0.0)


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
        best = _better(problem, best, _filled(problem, orders))
    if best is not None:
        found.append(Found(best.length(problem), problem.plan(best.orders)))
    return min(found, key=lambda f: f.length, default=None)


def _judged(problem: Problem, plan: Plan, costs: Costs) -> Found | None:
    simulation = simulate(plan, costs)
    if any(peak > cap + 1e-9 for peak, cap in zip(simulation.peak_memory, problem.caps, strict=True)):
        return None
    return Found(simulation.makespan if problem.objective == "makespan" else simulation.span, plan)


def _filled(problem: Problem, orders: Orders) -> Filled | None:
    best: Filled | None = None
    for patience in _PATIENCE:
        filled = fill_gaps(problem, orders, [patience] * problem.num_ranks)
        if filled is None:
            return None
        best = _better(problem, best, filled)
    return best


def _better(problem: Problem, one: Filled | None, other: Filled | None) -> Filled | None:
    if one is None or other is None:
        return one or other
    return other if other.length(problem) < one.length(problem) - 1e-12 else one
