"""Why ranks wait: because of the schedule, because stages are unequal, or for messages."""

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from lightning_pipeline.schedules.plans.action import Action
from lightning_pipeline.schedules.plans.costs import Costs
from lightning_pipeline.schedules.plans.simulation import Simulation, simulate

CAUSES = ("schedule", "imbalance", "message")
_LEAST = 1e-9  # of the makespan; less is rounding
_AFTER_ALL = Action(-1, "", -1)  # stands for the end of the step


class Wait(NamedTuple):
    """A part of a rank's time in which it does nothing.

    Args:
        rank: Of the pipeline.
        start: In the units of the simulation.
        end: Likewise.
        cause: `schedule`: it would wait with equal stages and free messages too; `imbalance`: with the
            stages as they are and free messages; `message`: the rest, such as messages and what delays them.
    """

    rank: int
    start: float
    end: float
    cause: str


def waits(run: Simulation) -> list[Wait]:
    """Every pause between the first start and the last end of any rank, in parts by cause.

    The pause before an action is compared with the one before it in two other runs of the plan: with the mean
    of all stages and free messages, and with each stage's own mean and free messages.

    Args:
        run: As measured or simulated.
    """
    even, free = evened(run), _freed(run)
    found: list[Wait] = []
    for rank in range(run.plan.num_ranks):
        by_schedule, by_stages = dict(_lengths(even, rank)), dict(_lengths(free, rank))
        for action, start, end in _pauses(run, rank):
            first = min(start + by_schedule.get(action, 0.0), end)
            second = min(max(start + by_stages.get(action, 0.0), first), end)
            edges = (start, first, second, end)
            for cause, begin, stop in zip(CAUSES, edges, edges[1:], strict=False):
                found.append(Wait(rank, begin, stop, cause))
    least = _LEAST * run.makespan
    return [wait for wait in found if wait.end - wait.start > least]


def evened(run: Simulation) -> Simulation:
    """The same plan with free messages and every stage the mean of all.

    Args:
        run: As measured or simulated.
    """
    return _again(run, lambda action: action.kind)


def _freed(run: Simulation) -> Simulation:
    """The same plan with free messages and every stage its own mean."""
    return _again(run, lambda action: (action.kind, action.stage))


def _again(run: Simulation, like: Callable[[Action], Hashable]) -> Simulation:
    """The same plan with the mean of what is alike."""
    plan = run.plan
    times: dict[Hashable, list[float]] = {}
    for timed in run.actions:
        times.setdefault(like(timed.action), []).append(timed.end - timed.start)
    means = {key: sum(found) / len(found) for key, found in times.items()}

    def of(kind: str) -> list[float]:
        return [means.get(like(Action(stage, kind, 0)), 0.0) for stage in range(plan.num_stages)]

    halves = zip(of("B"), of("I"), of("W"), strict=True)
    backward = [whole or first + second for whole, first, second in halves]
    if not plan.splits_backward:
        return simulate(plan, Costs(of("F"), backward, [0.0] * plan.num_stages))
    first = [half or whole / 2 for half, whole in zip(of("I"), of("B"), strict=True)]
    second = [max(whole - half, 0.0) for whole, half in zip(backward, first, strict=True)]
    return simulate(plan, Costs(of("F"), first, second))


def _lengths(run: Simulation, rank: int) -> Iterator[tuple[Action, float]]:
    for action, start, end in _pauses(run, rank):
        yield action, end - start


def _pauses(run: Simulation, rank: int) -> Iterator[tuple[Action, float, float]]:
    """The actions of a rank, each with the idle time before it, and the time after the last one."""
    free = 0.0
    for timed in run.actions:
        if timed.rank == rank:
            yield timed.action, free, max(free, timed.start)
            free = timed.end
    yield _AFTER_ALL, free, max(free, run.makespan)
