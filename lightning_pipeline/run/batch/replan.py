"""`schedule="Auto"` in a run: measure the stages in the first steps, then change the order of the actions."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import median

from lightning_pipeline.model.cut import Partition, stage_activations
from lightning_pipeline.recording import Recording, Timeline
from lightning_pipeline.schedules import Auto, Costs, Plan, Schedule

WARM_UP_STEPS = 2  # the first ones pay for caches and allocations
MEASURED_STEPS = 5

Seconds = dict[tuple[int, str], float]  # of one action of a stage, by stage and kind


class Replanner:
    """Gives the planner what the stages really cost; placement and cut stay as they are.

    Args:
        schedule: The planner.
        partition: Tells what each stage holds for one micro-batch.
        gather: Collects a value of every pipeline rank, on all of them.
        share: Runs a function on global rank 0 and gives its result to all ranks.
    """

    def __init__(
        self,
        schedule: Auto,
        partition: Partition,
        gather: Callable[[Seconds], list[Seconds]],
        share: Callable[[Callable[[], str]], str],
    ) -> None:
        self._schedule, self._gather, self._share = schedule, gather, share
        self._activation = _activations(partition)
        self._seen: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._steps = 0
        self._recordings: list[Recording] = []
        self._unwatch: Callable[[], None] | None = None

    def after(self, plan: Plan, timeline: Timeline) -> Plan | None:
        """Take note of a training step.

        Args:
            plan: What was run; the same on all ranks.
            timeline: What happened on this one.

        Returns:
            The plan to run from the next step on, the same on all ranks; `None` while there is none yet.
        """
        self._steps += 1
        if self._unwatch is None:
            self._unwatch = timeline.watch()
        if self._steps <= WARM_UP_STEPS or self._steps > WARM_UP_STEPS + MEASURED_STEPS:
            return None
        self._recordings.append(timeline.last)
        if self._steps < WARM_UP_STEPS + MEASURED_STEPS:
            return None
        self._unwatch()
        for event in chain.from_iterable(self._recordings):  # a device is waited for here alone
            self._seen[event.action.stage, event.action.kind].append((event.ended - event.started) / 1e9)
        self._recordings.clear()
        own = {key: median(times) for key, times in self._seen.items()}
        self._seen.clear()
        merged: Seconds = {}
        for seconds in self._gather(own):
            merged.update(seconds)
        return Plan.parse(self._share(lambda: self._best(plan, merged)))

    def _best(self, plan: Plan, seconds: Seconds) -> str:
        stages = range(plan.num_stages)
        halves = [_halves(seconds, stage) for stage in stages]
        costs = Costs(
            [seconds[stage, "F"] for stage in stages],
            [first for first, _ in halves],
            [second for _, second in halves],
            activation=self._activation,
        )
        placement = [plan.rank_of(stage) for stage in stages]
        return str(self._schedule.reorder(placement, plan.num_microbatches, costs))


def reordering_by(
    schedule: Schedule, partition: Partition, gather: Callable[[Seconds], list[Seconds]],
    share: Callable[[Callable[[], str]], str],
) -> Replanner | None:  # fmt: skip
    """What plans a run anew, where its schedule does so. See `Replanner`."""
    return Replanner(schedule, partition, gather, share) if isinstance(schedule, Auto) else None


def _halves(seconds: Seconds, stage: int) -> tuple[float, float]:
    """Seconds of I and W; a plan that never splits a stage's backward shows their sum alone."""
    if (stage, "I") in seconds and (stage, "W") in seconds:
        return seconds[stage, "I"], seconds[stage, "W"]
    return seconds[stage, "B"] / 2, seconds[stage, "B"] / 2


def _activations(partition: Partition) -> Sequence[float]:
    """What each stage holds for one micro-batch, as shares of the stage that holds most."""
    held = [stage.until_backward for stage in stage_activations(partition)]
    most = max(held) or 1.0
    return [max(amount / most, 1e-3) for amount in held]
