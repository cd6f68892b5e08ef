"""Parts of the table that closes `fit`."""

from typing import Any

import pytest
import torch

from lightning_pipeline.measure.measurement import Measurement
from lightning_pipeline.measure.meter import tokens_of
from lightning_pipeline.measure.report import crowded_line, expected_line, hop_seconds, work_line
from lightning_pipeline.measure.shares import CATEGORIES
from lightning_pipeline.measure.steps import RankStep
from lightning_pipeline.recording.timeline import Event
from lightning_pipeline.schedules import Action, OneFOneB, Plan

MS = 1_000_000


def event(text: str, asked: int, started: int, ended: int) -> Event:
    return Event(Action.parse(text), asked * MS, started * MS, ended * MS)


def test_a_hop_is_from_an_end_to_the_start_of_what_waited_for_it() -> None:
    plan = Plan.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    first = (
        event("0F0", 0, 0, 10),
        event("0F1", 10, 10, 20),
        event("0B0", 20, 33, 40),
        event("0B1", 50, 51, 60),
    )
    second = (
        event("1F0", 0, 12, 20),
        event("1B0", 20, 20, 30),
        event("1F1", 30, 31, 40),
        event("1B1", 40, 40, 49),
    )
    steps = [RankStep(0, (0,), 0, 60 * MS, first), RankStep(1, (1,), 0, 60 * MS, second)]
    # 1F0 waited 2 ms from the end of 0F0, 0B0 3 ms; 1F1 and 0B1 found their messages there.
    assert hop_seconds(plan, steps) == pytest.approx(0.0025)


def test_more_ranks_than_cores_are_told_of() -> None:
    assert crowded_line(3, 2) == "3 ranks share 2 cores: they wait for one, and messages do"
    assert crowded_line(2, 1) == "2 ranks share 1 core: they wait for one, and messages do"
    assert crowded_line(2, 2) is None


def test_a_step_in_which_nobody_waited_has_no_hops() -> None:
    plan = Plan.parse("0F0 1F0 1B0 0B0")
    events = tuple(event(text, k, k, k + 1) for k, text in enumerate(("0F0", "1F0", "1B0", "0B0")))
    assert hop_seconds(plan, [RankStep(0, (0, 1), 0, 4 * MS, events)]) == 0.0


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(3, 5, dtype=torch.long), 15),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.zeros(2)}, 8),
        ([torch.zeros(3, 5, dtype=torch.int32), torch.zeros(3)], 15),
        (torch.zeros(3, 5), 0),
        (torch.zeros(3, dtype=torch.long), 0),
        ({"x": torch.zeros(3, 5, dtype=torch.long)}, 0),
        ("text", 0),
        ([], 0),
        (None, 0),
    ],
)
def test_tokens_are_integers_by_sample_and_position(batch: Any, tokens: int) -> None:
    assert tokens_of(batch) == tokens


def test_the_table_says_what_was_expected_and_what_a_device_does() -> None:
    plan = OneFOneB().plan(2, 2)
    costs = {(stage, kind): time for stage, time in ((0, 0.01), (1, 0.03)) for kind in "FB"}
    none = {name: 0.0 for name in CATEGORIES}
    total = Measurement(plan, 10, [none, none], 3.0, 2.0, costs, 0, 0, [0.0, 0.0])
    # F and B of stage 1 twice, 120 ms, and F and B of stage 0 before and after; with 20 ms each 6 actions
    assert expected_line(total) == (
        "Schedule 200.00 ms; expected 140.00 ms of these stages with free messages, 120.00 ms of equal ones"
    )
    assert work_line(2.5e12, None) == "Each device does 2.5 TFLOP/s"
    assert work_line(2.5e12, 10e12) == "Each device does 2.5 TFLOP/s, 25.0% of its peak (MFU)"
    assert set(total.values(["stage_0", "stage_1"], per_stage=False)) == {
        "bubble_fraction", "bubble_fraction_simulated", "bubble_fraction_equal_stages", "slowest_stage",
        "step_time_s", "makespan_s",
    }  # fmt: skip
