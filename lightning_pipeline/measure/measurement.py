"""What was measured over some steps, and what the simulator makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pipeline.measure.shares import CATEGORIES, KINDS, Shares
from lightning_pipeline.schedules import Costs, Plan, simulate

Seconds = Mapping[tuple[int, str], float]  # of one action, by stage and kind


@dataclass(frozen=True)
class Measurement:
    """Some steps of all ranks: means over the replicas, sums over the steps.

    Args:
        plan: That most micro-batches were run by.
        steps: How many.
        seconds: By pipeline rank and category.
        step: Seconds of the steps, the mean over ranks.
        makespan: Seconds from the first start of an action on any rank to the last end.
        costs: Median seconds of one action, by stage and kind.
        samples: In the batches of all replicas; 0 where they do not tell.
        tokens: Likewise, where a batch holds integers by sample and position.
        sent: Bytes sent to other stages, by pipeline rank.
    """

    plan: Plan
    steps: int
    seconds: list[dict[str, float]]
    step: float
    makespan: float
    costs: dict[tuple[int, str], float]
    samples: float
    tokens: float
    sent: list[float]

    def __add__(self, other: "Measurement") -> "Measurement":
        steps = self.steps + other.steps
        parts = ((self, self.steps / steps), (other, other.steps / steps))
        return Measurement(
            other.plan,
            steps,
            [
                {name: mine[name] + theirs[name] for name in mine}
                for mine, theirs in zip(self.seconds, other.seconds, strict=True)
            ],
            self.step + other.step,
            self.makespan + other.makespan,
            {
                key: sum(share * part.costs.get(key, seconds) for part, share in parts)
                for key, seconds in (self.costs | other.costs).items()
            },
            self.samples + other.samples,
            self.tokens + other.tokens,
            [mine + theirs for mine, theirs in zip(self.sent, other.sent, strict=True)],
        )

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds of action that the plan has."""
        there = {action.kind for actions in self.plan for action in actions}
        return [name for kind, name in KINDS.items() if kind in there]

    @property
    def idle(self) -> list[float]:
        """Of each rank, seconds within the makespan in which it ran no action."""
        return [self.makespan - sum(mine[kind] for kind in KINDS.values()) for mine in self.seconds]

    @property
    def bubble(self) -> float:
        """Idle share of all rank-time within the makespan."""
        return sum(self.idle) / (len(self.idle) * self.makespan) if self.makespan else 0.0

    def values(self, names: Sequence[str], *, per_stage: bool = True) -> dict[str, float]:
        """What is logged, by key: means per step.

        Args:
            names: Of the ranks' stages.
            per_stage: Whether to give the figures of each rank, too.
        """
        free = IdealBubble.of(self.plan, self.costs)
        found = {
            "bubble_fraction": self.bubble,
            "bubble_fraction_simulated": free.bubble,
            "bubble_fraction_equal_stages": free.bubble_equal_stages,
            "slowest_stage": float(free.slowest),
            "step_time_s": self.step / self.steps,
            "makespan_s": self.makespan / self.steps,
        }
        if not per_stage:
            return found
        kinds = self.kinds
        for name, mine, idle in zip(names, self.seconds, self.idle, strict=True):
            found[f"{name}/idle_s"] = idle / self.steps
            for category in CATEGORIES:
                if category in kinds or category not in KINDS.values():
                    found[f"{name}/{category}_s"] = mine[category] / self.steps
        return found


@dataclass(frozen=True)
class IdealBubble:
    """The same plan with the measured actions and messages that cost nothing.

    Args:
        bubble: Idle share of all rank-time within the makespan.
        bubble_equal_stages: The same, were every stage the mean of all.
        slowest: The stage whose actions on one micro-batch take longest.
        makespan: Seconds of the schedule.
        makespan_equal_stages: The same, were every stage the mean of all.
    """

    bubble: float
    bubble_equal_stages: float
    slowest: int
    makespan: float
    makespan_equal_stages: float

    @classmethod
    def of(cls, plan: Plan, costs: Seconds) -> "IdealBubble":
        """Simulate a plan.

        Args:
            plan: What was run.
            costs: Seconds of one action, by stage and kind.
        """
        by_kind = stage_costs(plan, costs)
        equal = [[sum(times) / len(times)] * len(times) for times in by_kind]
        totals = [sum(times) for times in zip(*by_kind, strict=True)]
        as_they_are, alike = simulate(plan, Costs(*by_kind)), simulate(plan, Costs(*equal))
        slowest = totals.index(max(totals))
        return cls(as_they_are.bubble, alike.bubble, slowest, as_they_are.makespan, alike.makespan)


def stage_costs(plan: Plan, costs: Seconds) -> tuple[list[float], list[float], list[float]]:
    """Seconds of F, I and W of each stage. Where a stage's backward is never split, I and W are half of B."""
    halves = [_halves(costs, stage) for stage in range(plan.num_stages)]
    forward = [costs.get((stage, "F"), 0.0) for stage in range(plan.num_stages)]
    return forward, [first for first, _ in halves], [second for _, second in halves]


def _halves(costs: Seconds, stage: int) -> tuple[float, float]:
    if (stage, "I") in costs and (stage, "W") in costs:
        return costs[stage, "I"], costs[stage, "W"]
    half = costs.get((stage, "B"), 0.0) / 2
    return half, half


def mean_of(shares: Sequence[Shares]) -> tuple[list[dict[str, float]], float, float]:
    """Seconds by rank and category, of the steps, and of the makespans: means over the replicas."""
    count = len(shares)
    seconds = [
        {name: sum(each.seconds[rank][name] for each in shares) / count for name in CATEGORIES}
        for rank in range(len(shares[0].seconds))
    ]
    ranks = len(shares[0].step)
    step = sum(sum(each.step) for each in shares) / (count * ranks)
    return seconds, step, sum(each.makespan for each in shares) / count
