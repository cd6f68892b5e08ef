"""A recorded step and its plan are put above each other, in milliseconds."""

import pytest

from lightning_pipeline.callbacks.timeline import PipelineTimeline
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.measure.timelines import Comparison
from lightning_pipeline.schedules import Costs, get_schedule, simulate
from lightning_pipeline.schedules.drawing.picture import Words
from tests.unit.callbacks.recorded import recorded


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


def test_text_of_a_long_step_goes_on_below() -> None:
    plan = get_schedule("1F1B").plan(4, 16)
    lines = Comparison(plan, recorded(plan), 9).text().splitlines()
    assert max(map(len, lines)) <= 150
    assert sum(line.startswith("rank 2 |") for line in lines) == 4  # two lines each, planned and measured
    words = " ".join(lines).split()
    assert words.count("F15") == words.count("B15") == 2 * 4


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
    captions = [s.text for s in comparison.picture().shapes if isinstance(s, Words) and s.bold]
    assert captions[0].startswith("planned: equal stages") and captions[1].startswith("measured in step 9: ")


def test_what_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigurationError, match=r"steps=\[3, -1\] must be a list .*; every_n_steps=0 must be a"
    ):
        PipelineTimeline(steps=[3, -1], every_n_steps=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"PNG needs matplotlib: pip install"):
        PipelineTimeline(png=True)
