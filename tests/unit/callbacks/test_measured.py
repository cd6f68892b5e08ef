"""A recorded step and its plan are put above each other, in milliseconds."""

from dataclasses import replace

import pytest

from lightning_pipeline.callbacks.timeline import PipelineTimeline
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.measure.timelines import Comparison
from lightning_pipeline.schedules import Costs, get_schedule, simulate
from lightning_pipeline.schedules.drawing.picture import Box, Words
from tests.unit.callbacks.recorded import START, recorded


def test_planned_and_measured_stand_above_each_other() -> None:
    plan = get_schedule("1F1B").plan(2, 2)
    text = Comparison(plan, recorded(plan, Costs([3.0, 3.0], [3.0, 6.0], [0.0, 0.0])), 9).text()
    assert text == (
        "planned: equal stages, free messages: 22.50 ms, bubble 33.3 %\n"
        "rank 0 | F0 -- F1 -- .. .. .. B0 -- -- .. .. B1 -- --\n"
        "rank 1 | .. .. F0 -- B0 -- -- F1 -- B1 -- --\n"
        "measured in step 9: 24.00 ms, bubble 37.5 %\n"
        "rank 0 | F0 -- F1 -- .. .. .. .. B0 -- .. .. .. .. B1 --\n"
        "rank 1 | .. .. F0 -- B0 -- -- -- F1 -- B1 -- -- --"
    )


def test_a_step_is_drawn_as_text_only_where_a_line_of_the_terminal_holds_it() -> None:
    plan = get_schedule("1F1B").plan(4, 16)
    comparison = Comparison(plan, recorded(plan), 9)
    short = comparison.text(150).splitlines()
    assert [line.split(":")[0] for line in short] == ["planned", "measured in step 9"]
    wide = comparison.text(300).splitlines()
    assert max(map(len, wide)) <= 300
    assert sum(line.startswith("rank 2 |") for line in wide) == 2


def test_what_lies_around_the_schedule_is_drawn_and_waiting_has_its_cause() -> None:
    plan = get_schedule("1F1B").plan(2, 4)
    steps = [
        replace(step, around=(("data", START - 2_000_000, START), ("optimizer", last, last + 3_000_000)))
        for step in recorded(plan, Costs([1.0, 3.0], [1.0, 3.0], [1.0, 3.0], send=0.5))
        for last in [max(event.ended for event in recorded(plan)[0].events)]
    ]
    picture = Comparison(plan, steps, 9, "1F1B").picture()
    assert picture.title.startswith("1F1B: 2 ranks, 4 micro-batches, bubble ")
    hints = [shape.hint.split(":")[0] for shape in picture.shapes if isinstance(shape, Box) and shape.hint]
    assert hints.count("data") == hints.count("optimizer") == 2
    assert {"idle by schedule", "by imbalance", "for messages"} <= set(hints)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1", "ZBV", "Interleaved1F1B"])
def test_a_step_that_went_as_planned_is_measured_as_planned(schedule: str) -> None:
    plan = get_schedule(schedule).plan(4, 8)
    costs = Costs([2.0] * plan.num_stages, [1.5] * plan.num_stages, [1.5] * plan.num_stages)
    comparison = Comparison(plan, recorded(plan, costs), 9)
    expected = simulate(plan, costs)
    for run in (comparison.planned, comparison.measured):
        assert run.makespan == pytest.approx(expected.makespan)
        assert run.bubble == pytest.approx(expected.bubble)
        assert [t.action for t in run.actions] == [t.action for t in expected.actions]


def test_an_imbalance_is_measured_and_not_planned() -> None:
    plan = get_schedule("GPipe").plan(2, 4)
    comparison = Comparison(plan, recorded(plan, Costs([1.0, 3.0], [1.0, 3.0], [1.0, 3.0])), 9)
    assert comparison.planned.bubble == pytest.approx(simulate(plan, Costs(1, 1, 1)).bubble)
    assert comparison.measured.bubble > comparison.planned.bubble + 0.1
    captions = [s.text for s in comparison.picture().shapes if isinstance(s, Words) and s.size == 13]
    assert captions[0].startswith("planned: equal stages") and captions[1].startswith("measured in step 9: ")


def test_what_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigurationError, match=r"steps=\[3, -1\] must be a list .*; every_n_steps=0 must be a"
    ):
        PipelineTimeline(steps=[3, -1], every_n_steps=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"PNG needs matplotlib: pip install"):
        PipelineTimeline(png=True)
