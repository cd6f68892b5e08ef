"""Every schedule's step, bubble and memory for a workload, best first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from lightning_pipeline.errors import PartitionError, ScheduleError
from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.workload import (
    PredictedMemory,
    StageTimes,
    Workload,
    memory_of,
    name_of,
    named_schedules,
)
from lightning_pipeline.schedules import Auto, Costs, Plan, Schedule, Simulation, simulate
from lightning_pipeline.schedules.plans import training_plan

SEARCHED = 600  # actions up to which the search of `Auto` takes a second or two
_DRAWN = 25  # steps of measured times; the one in the middle is the prediction
_DRAWN_ACTIONS = 50_000  # in all of them


@dataclass(frozen=True)
class Prediction:
    """A schedule, and how a step with it would go.

    Attributes:
        name: Of the schedule.
        schedule: The rule.
        simulation: The step; seconds and bytes. Of measured times, the one in the middle of 25 for which each
            action's time is drawn from those that were measured.
        memory: By rank.
        fits: Whether every rank's memory is within a device's.
        replicas: Of the pipeline.
        reduction: Seconds in which they average their gradients, after the schedule.
        handling: Seconds that all ranks together spend on messages, which the simulation has within actions.
    """

    name: str
    schedule: Schedule
    simulation: Simulation
    memory: tuple[PredictedMemory, ...]
    fits: bool
    replicas: int = 1
    reduction: float = 0.0
    handling: float = 0.0

    @property
    def plan(self) -> Plan:
        """The rule worked out."""
        return self.simulation.plan

    @property
    def stages_per_rank(self) -> int:
        """Stages on each rank."""
        return self.plan.num_stages // self.plan.num_ranks

    @property
    def step(self) -> float:
        """Seconds from the first action until the gradients are averaged; optimizer and data apart."""
        return self.simulation.makespan + self.reduction

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.plan.num_ranks * self.replicas

    @property
    def bubble(self) -> float:
        """Share of all rank-time in which ranks run no action."""
        whole = self.plan.num_ranks * self.simulation.makespan
        return self.simulation.bubble + (self.handling / whole if whole else 0.0)

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(memory.total for memory in self.memory)


def predict(
    workload: Workload,
    num_ranks: int,
    num_microbatches: int,
    assumptions: Assumptions,
    *,
    own: Schedule | None = None,
    only: bool = False,
    replicas: int = 1,
    quick: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> list[Prediction]:
    """Simulate the registered schedules with one and two stages per rank, and the user's own.

    Args:
        workload: For one of the micro-batches.
        num_ranks: Devices of the pipeline.
        num_microbatches: Per batch.
        assumptions: About the machine.
        own: A schedule of the user's.
        only: Whether to leave the others out.
        replicas: Of the pipeline; `num_microbatches` is that of one.
        quick: Whether to leave out what takes long: the search of `Auto`, and cuts through units.
        progress: Told what is done, how much of it, and of how much.

    Returns:
        Those that serve these sizes: what fits first, and the fastest of it first.

    Raises:
        SplitError: The step cannot be cut.
        PartitionError: There are fewer units than ranks.
        ScheduleError: The user's own does not serve these sizes, or trains nothing.
    """
    found: list[Prediction] = []

    def add(name: str, schedule: Schedule) -> None:
        sizes = num_ranks, num_microbatches, replicas
        found.append(_prediction(workload, name, schedule, sizes, assumptions))

    if own is not None:
        add(name_of(own), own)
    others = [] if only else list(_candidates(workload, num_ranks, num_microbatches, quick))
    for done, (name, schedule) in enumerate(others):
        progress("schedules", done, len(others))
        if own is None or (name, schedule.stages_per_rank) != (found[0].name, own.stages_per_rank):
            try:
                add(name, schedule)
            except ScheduleError:  # it does not serve these sizes
                continue
    return sorted(found, key=lambda one: (not one.fits, one.step, one.peak))


def _candidates(
    workload: Workload, num_ranks: int, num_microbatches: int, quick: bool
) -> Iterator[tuple[str, Schedule]]:
    workload.partition(num_ranks)  # refuses too many ranks
    yield from named_schedules(1)
    if not quick and num_ranks * num_microbatches <= SEARCHED:
        yield "Auto", Auto()
    if quick and 2 * num_ranks > workload.num_units:
        return
    try:
        workload.partition(2 * num_ranks)
    except PartitionError:  # there are units for one stage per rank only
        return
    yield from named_schedules(2)


def _prediction(
    workload: Workload, name: str, schedule: Schedule, sizes: tuple[int, int, int], assumptions: Assumptions
) -> Prediction:
    num_ranks, num_microbatches, replicas = sizes
    plan = _plan(workload, schedule, num_ranks, num_microbatches, assumptions)
    stages = workload.stages(plan.num_stages)
    times = workload.times(plan.num_stages, assumptions)
    held = [float(stage.activation_bytes) for stage in stages]
    far = _far_stages(plan, replicas, assumptions)
    within = {s for s in range(1, plan.num_stages) if plan.rank_of(s) == plan.rank_of(s - 1)}
    simulation = _step(plan, times, times.costs(plan.splits_backward, held, far, within))
    handling = num_microbatches * sum(map(sum, times.handling(within)))
    kept = workload.held(plan.num_stages, [plan.rank_of(stage) for stage in range(plan.num_stages)])
    memory = memory_of(plan, kept, stages, assumptions, workload.optimizer_states)
    fits = assumptions.memory is None or max(rank.total for rank in memory) <= assumptions.memory
    most = max(rank.gradients for rank in memory)
    reduction = assumptions.exchange(most, replicas) if replicas > 1 else 0.0
    return Prediction(name, schedule, simulation, memory, fits, replicas, reduction, handling)


def _step(plan: Plan, times: StageTimes, costs: Costs) -> Simulation:
    if not times.seen:
        return simulate(plan, costs)
    dice, actions = Random(0), sum(map(len, plan))  # the same for each schedule
    steps = min(_DRAWN, max(_DRAWN_ACTIONS // actions, 1))
    drawn = [simulate(plan, costs, times=times.drawn(plan, costs, dice)) for _ in range(steps)]
    return sorted(drawn, key=lambda step: step.makespan)[steps // 2]


def _far_stages(plan: Plan, replicas: int, assumptions: Assumptions) -> frozenset[int]:
    """Stages on another node than the one before: replicas of a rank are neighbours, as in `Numbering`."""
    last = plan.rank_of(plan.num_stages - 1)
    block = [(last - rank) % plan.num_ranks * replicas for rank in range(plan.num_ranks)]

    def crosses(stage: int) -> bool:
        here, before = block[plan.rank_of(stage)], block[plan.rank_of(stage - 1)]
        return any(assumptions.crosses(here + replica, before + replica) for replica in range(replicas))

    return frozenset(stage for stage in range(1, plan.num_stages) if crosses(stage))


def _plan(
    workload: Workload, schedule: Schedule, num_ranks: int, num_microbatches: int, assumptions: Assumptions
) -> Plan:
    if not isinstance(schedule, Auto) or schedule.costs is not None:
        return training_plan(schedule, num_ranks, num_microbatches)
    # a run measures one stage per rank, then searches for a better order
    held = [float(stage.activation_bytes) for stage in workload.stages(num_ranks)]
    shares = [max(size / (max(held) or 1.0), 1e-3) for size in held]
    costs = workload.times(num_ranks, assumptions).costs(True, shares)
    return schedule.reorder(range(num_ranks), num_microbatches, costs)
