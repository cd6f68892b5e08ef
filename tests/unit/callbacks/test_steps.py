"""A gathered step is on one clock."""

from typing import Any

from lightning_pipeline.measure.steps import gather_step
from lightning_pipeline.ranks.alignment import Offset
from lightning_pipeline.recording.timeline import Timeline
from lightning_pipeline.schedules import Action


class Run:
    """Two ranks that did the same at the same moment; the second one's clock is 5 s ahead."""

    stages_here = (0,)
    messages = None

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.clock_offsets: list[Offset] = []

    def align_clocks(self, exchanges: int = 8) -> list[Offset]:
        self.clock_offsets = [Offset(), Offset(5_000_000_000, 100)]
        return self.clock_offsets

    def gather_from_pipeline(self, value: Any) -> list[Any]:
        stages, began, finished, events, messages, around = value
        beside = [(kind, begin + 5_000_000_000, end + 5_000_000_000) for kind, begin, end in around]
        ahead = 5_000_000_000
        later = [(action, *(time + ahead for time in times)) for action, *times in events]
        return [value, (stages, began + ahead, finished + ahead, later, messages, beside)]


def test_all_ranks_times_are_on_the_first_one_s_clock() -> None:
    run: Any = Run()
    run.timeline.begin([Action(0, "F", 0)])
    run.timeline.ask(0)
    run.timeline.start()
    run.timeline.end()
    run.timeline.finish()
    first, second = gather_step(run, around=[("data", 3, 7)])
    assert first.around == second.around == (("data", 3, 7),)
    assert (first.began, first.finished, first.events) == (second.began, second.finished, second.events)
    assert list(first.events) == list(run.timeline.last)
