"""A recorded step beside what was planned, as pictures."""

from collections.abc import Sequence
from itertools import chain

from lightning_pipeline.measure.steps import RankStep
from lightning_pipeline.schedules import Costs, Plan, Simulation, draw, simulate
from lightning_pipeline.schedules.drawing import Panel, Picture, arrange
from lightning_pipeline.schedules.plans import Timed, summarize

_LINE = 150  # characters of the text picture; a column takes three or four
_MOST_COLUMNS = 300


class Comparison:
    """What one step was planned to be, and what it was, in milliseconds.

    Attributes:
        planned: The plan with free messages and equal stages: the means of what was measured.
        measured: What happened; time begins with the first action of any rank.

    Args:
        plan: What was run.
        steps: Of every rank, by pipeline rank, on one clock.
        number: Of the batch, for the captions.
    """

    def __init__(self, plan: Plan, steps: Sequence[RankStep], number: int) -> None:
        self._means = {kind: _mean(steps, kind) for kind in "FBIW"}
        costs = _equal_costs(plan, self._means)
        self.planned = simulate(plan, costs)
        counts = [len(plan.stages_of(plan.rank_of(stage))) for stage in range(plan.num_stages)]
        self.measured = summarize(plan, _timed(steps), costs.per_stage(counts))
        self._captions = (
            f"planned: equal stages, free messages: {_figures(self.planned)}",
            f"measured in step {number}: {_figures(self.measured)}",
        )

    def picture(self) -> Picture:
        """Planned above measured, to the same scale."""
        return arrange(
            [
                Panel(simulation, caption, "ms")
                for simulation, caption in zip((self.planned, self.measured), self._captions, strict=True)
            ]
        )

    def text(self) -> str:
        """Planned above measured; lines are cut at 150 characters and go on below."""
        column = self._column()
        above, below = (
            draw(simulation, column=column, width=_LINE) for simulation in (self.planned, self.measured)
        )
        return f"{self._captions[0]}\n{above}\n{self._captions[1]}\n{below}"

    def _column(self) -> float:
        """Half of the shortest kind of action where that fits a line, otherwise all of it."""
        longest = max(self.planned.makespan, self.measured.makespan)
        shortest = min((mean for mean in self._means.values() if mean > 0), default=1.0)
        shortest = max(shortest, longest / _MOST_COLUMNS)
        return shortest / 2 if 2 * longest / shortest <= _LINE / 4 else shortest


def _figures(simulation: Simulation) -> str:
    return f"{simulation.makespan:.2f} ms, bubble {100 * simulation.bubble:.1f} %"


def _mean(steps: Sequence[RankStep], kind: str) -> float:
    """Milliseconds of an action of this kind; 0 where there is none."""
    events = [event for step in steps for event in step.events if event.action.kind == kind]
    return sum(event.ended - event.started for event in events) / 1e6 / max(1, len(events))


def _equal_costs(plan: Plan, means: dict[str, float]) -> Costs:
    halves = (means["I"], means["W"]) if plan.splits_backward else (means["B"] / 2, means["B"] / 2)
    forward, first, second = ([mean] * plan.num_stages for mean in (means["F"], *halves))
    return Costs(forward, first, second)


def _timed(steps: Sequence[RankStep]) -> list[list[Timed]]:
    zero = min(chain.from_iterable((event.started for event in step.events) for step in steps), default=0)
    return [
        [
            Timed(event.action, step.rank, (event.started - zero) / 1e6, (event.ended - zero) / 1e6)
            for event in step.events
        ]
        for step in steps
    ]
