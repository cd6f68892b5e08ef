"""A recorded step beside what was planned, as pictures."""

from collections.abc import Sequence
from itertools import chain

from lightning_pipeline.measure.steps import RankStep
from lightning_pipeline.schedules import Costs, Plan, Simulation, draw, simulate
from lightning_pipeline.schedules.drawing import Panel, Picture, Span, arrange, title_of
from lightning_pipeline.schedules.plans import Timed, summarize, waits

_LINE = 150  # characters of the text picture where no terminal says; a column takes three or four
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
        name: Of the schedule, for the title.
    """

    def __init__(self, plan: Plan, steps: Sequence[RankStep], number: int, name: str = "") -> None:
        self._name, self._around = name, _around(steps)
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
        """Planned above measured, to the same scale; measured pauses by cause, and what lay around."""
        causes = waits(self.measured)
        return arrange(
            [
                Panel(self.planned, self._captions[0], "ms"),
                Panel(self.measured, self._captions[1], "ms", causes, self._around),
            ],
            title=title_of(self.measured, self._name),
        )

    def text(self, width: int = _LINE) -> str:
        """Planned above measured, where lines of this width hold them; else the captions alone.

        Args:
            width: Characters of a line.
        """
        for column in self._columns(width):
            drawn = [draw(simulation, column=column) for simulation in (self.planned, self.measured)]
            if max(len(line) for picture in drawn for line in picture.splitlines()) <= width:
                return "\n".join(chain.from_iterable(zip(self._captions, drawn, strict=True)))
        return "\n".join(self._captions)

    def _columns(self, width: int) -> list[float]:
        """The time of a column: half of the shortest kind of action where that fits a line, otherwise all."""
        longest = max(self.planned.makespan, self.measured.makespan)
        shortest = min((mean for mean in self._means.values() if mean > 0), default=1.0)
        shortest = max(shortest, longest / _MOST_COLUMNS)
        return [shortest / 2, shortest] if 2 * longest / shortest <= width / 4 else [shortest]


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


def _around(steps: Sequence[RankStep]) -> list[Span]:
    """Milliseconds since the first action; of what comes before it, at most half of the step."""
    zero = _zero(steps)
    ends = [event.ended for step in steps for event in step.events]
    least = -(max(ends, default=zero) - zero) / 2
    found = [
        Span(step.rank, max(begin - zero, least) / 1e6, (end - zero) / 1e6, kind)
        for step in steps
        for kind, begin, end in step.around
    ]
    return [span for span in found if span.end > span.start]


def _zero(steps: Sequence[RankStep]) -> int:
    return min(chain.from_iterable((event.started for event in step.events) for step in steps), default=0)


def _timed(steps: Sequence[RankStep]) -> list[list[Timed]]:
    zero = _zero(steps)
    return [
        [
            Timed(event.action, step.rank, (event.started - zero) / 1e6, (event.ended - zero) / 1e6)
            for event in step.events
        ]
        for step in steps
    ]
