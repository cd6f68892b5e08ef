"""When each action of a plan would run, and the memory it would hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules.plans.action import COMPUTE, Action
from lightning_pipeline.schedules.plans.communicate import global_order, groups
from lightning_pipeline.schedules.plans.costs import Costs, StageCosts
from lightning_pipeline.schedules.plans.plan import Plan


class Timed(NamedTuple):
    """An action with the time it occupies its rank."""

    action: Action
    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A plan's expected run, in the units of the costs.

    Attributes:
        plan: What was simulated.
        makespan: First start to last end over all ranks: a step that ends in a barrier takes this.
        span: Largest (last end - first start) of any one rank: the rate of steps that overlap.
        bubble: Idle share of all rank-time within the makespan.
        bubble_span: Idle share within the span.
        peak_memory: By rank, the largest activation memory held.
        busy: By rank, the time spent in actions.
        actions: Every action with its rank, start and end, rank by rank.
    """

    plan: Plan
    makespan: float
    span: float
    bubble: float
    bubble_span: float
    peak_memory: tuple[float, ...]
    busy: tuple[float, ...]
    actions: tuple[Timed, ...]


def simulate(plan: Plan, costs: Costs, *, times: Mapping[Action, float] | None = None) -> Simulation:
    """Time a plan: every action starts as soon as its rank is free and what it needs has arrived.

    A pair that runs as one waits for what both need, and hands over both results at its end.

    Args:
        plan: Without messages; hops are added from `costs.send`.
        costs: Times and memory. A number is one rank's whole share.
        times: Of single actions that take longer or shorter than the costs say.

    Raises:
        ScheduleError: The ranks wait for each other.
        ConfigurationError: The costs are given for another number of stages.
    """
    counts = [len(plan.stages_of(rank)) for rank in range(plan.num_ranks)]
    stage_costs = costs.per_stage([counts[plan.rank_of(stage)] for stage in range(plan.num_stages)])
    timed = _Clock(plan, stage_costs, times or {}).run()
    return summarize(plan, timed, stage_costs)


def summarize(plan: Plan, timed: list[list[Timed]], costs: StageCosts) -> Simulation:
    """What follows from when each action ran, simulated or measured.

    Args:
        plan: What was run.
        timed: By rank its actions, in order.
        costs: For the memory.
    """
    busy = tuple(sum(t.end - t.start for t in mine) for mine in timed)
    ends = [mine[-1].end if mine else 0.0 for mine in timed]
    starts = [mine[0].start if mine else 0.0 for mine in timed]
    makespan = max(ends, default=0.0) - min(starts, default=0.0)
    span = max((end - start for start, end in zip(starts, ends, strict=True)), default=0.0)
    return Simulation(
        plan=plan,
        makespan=makespan,
        span=span,
        bubble=_idle(busy, makespan),
        bubble_span=_idle(busy, span),
        peak_memory=peak_memory(plan, costs),
        busy=busy,
        actions=tuple(t for mine in timed for t in mine),
    )


def _idle(busy: tuple[float, ...], duration: float) -> float:
    return 1.0 - sum(busy) / (len(busy) * duration) if duration > 0 else 0.0


def peak_memory(plan: Plan, costs: StageCosts) -> tuple[float, ...]:
    """By rank, the most that is held at once. An evaluation holds one forward's activations at a time."""
    forward_only = all(action.kind == "F" for actions in plan for action in actions)
    growth = {(s, k): costs.growth(s, k) for s in range(plan.num_stages) for k in COMPUTE}
    peaks = []
    for actions in plan:
        held = peak = 0.0
        for stage, kind, _ in actions:
            held = growth[stage, kind] + (0.0 if forward_only else held)
            peak = max(peak, held)
        peaks.append(round(peak, 9))
    return tuple(peaks)


class _Step(NamedTuple):
    """How a kind of action on a stage is timed: what it waits for, how long it takes, where its end goes."""

    waits_for: dict[int, float] | None
    shift: int
    hop: float
    duration: float
    ends: dict[int, float]


class _Clock:
    """Runs a plan's actions in order on each rank; a rank that waits is woken by what it waits for."""

    def __init__(self, plan: Plan, costs: StageCosts, times: Mapping[Action, float]) -> None:
        self._plan, self._times = plan, times
        self._microbatches = plan.num_microbatches
        # End times by stage * microbatches + microbatch. What waits for a weight half does not exist.
        self._forward: dict[int, float] = {}
        self._backward: dict[int, float] = {}
        self._weight: dict[int, float] = {}
        self._steps = {(s, k): self._step(s, k, costs) for s in range(plan.num_stages) for k in COMPUTE}
        self._sleepers: dict[tuple[int, int], int] = {}

    def _step(self, stage: int, kind: str, costs: StageCosts) -> _Step:
        plan, m, duration = self._plan, self._microbatches, costs.duration(stage, kind)
        if kind == "W":
            return _Step(self._backward, 0, 0.0, duration, self._weight)
        other = stage - 1 if kind == "F" else stage + 1
        ends = self._forward if kind == "F" else self._backward
        if other < 0:
            return _Step(None, 0, 0.0, duration, ends)
        if other == plan.num_stages:
            return _Step(self._forward, 0, 0.0, duration, ends)
        hop = costs.send[max(stage, other)] if plan.rank_of(other) != plan.rank_of(stage) else 0.0
        return _Step(ends, m * (other - stage), hop, duration, ends)

    def run(self) -> list[list[Timed]]:
        """All actions with their times, per rank.

        Raises:
            ScheduleError: The ranks wait for each other.
        """
        plan = self._plan
        todo: list[list[tuple[Action, ...]]] = [groups(plan, rank) for rank in range(plan.num_ranks)]
        position = [0] * plan.num_ranks
        timed: list[list[Timed]] = [[] for _ in todo]
        awake = list(range(plan.num_ranks))
        while awake:
            rank = awake.pop()
            queue, mine = todo[rank], timed[rank]
            free = mine[-1].end if mine else 0.0
            while position[rank] < len(queue):
                group = queue[position[rank]]
                start = self._start(group, free, rank)
                if start is None:
                    break
                free = self._finish(group, start, rank, mine, awake)
                position[rank] += 1
        if any(at < len(queue) for at, queue in zip(position, todo, strict=True)):
            global_order(plan)  # says who waits for whom
            raise ScheduleError("a W comes before its I, or a backward before its forward: see check(plan)")
        return timed

    def _start(self, group: tuple[Action, ...], free: float, rank: int) -> float | None:
        """When a group can start; None, and the rank sleeps, when something it needs has no time yet."""
        for stage, kind, microbatch in group:
            waits_for, shift, hop, _, _ = self._steps[stage, kind]
            if waits_for is None:
                continue
            key = stage * self._microbatches + microbatch
            end = waits_for.get(key + shift)
            if end is None or (kind != "F" and key not in self._forward):
                self._sleepers[id(waits_for), key + shift] = rank
                return None
            free = max(free, end + hop)
        return free

    def _finish(
        self, group: tuple[Action, ...], start: float, rank: int, mine: list[Timed], awake: list[int]
    ) -> float:
        """Write a group down and wake who waited for it; when it ends."""
        for action in group:
            usual = self._steps[action.stage, action.kind].duration
            end = start + self._times.get(action, usual)
            mine.append(Timed(action, rank, start, end))
            start = end
        for stage, kind, microbatch in group:
            key, ends = stage * self._microbatches + microbatch, self._steps[stage, kind].ends
            ends[key] = start
            if self._sleepers:
                sleeper = self._sleepers.pop((id(ends), key), None)
                if sleeper is not None:
                    awake.append(sleeper)
        return start
