"""Where the time of a step went: hand-made timelines, worked out by hand."""

from dataclasses import replace

import pytest

from lightning_pipeline.measure.measurement import IdealBubble, Measurement, mean_of
from lightning_pipeline.measure.shares import CATEGORIES, Around, Shares, row, share_out
from lightning_pipeline.recording.timeline import Recording
from lightning_pipeline.schedules import Action, Costs, Plan, get_schedule, simulate

S = 1_000_000_000
Times = tuple[str, float, float, float]


def recording(began: float, *events: Times) -> Recording:
    made = Recording(0, [Action.parse(text) for text, *_ in events])
    made.position = len(events) - 1
    made.asked, made.started, made.ended = ([int(S * event[k]) for event in events] for k in (1, 2, 3))
    made.bounds = [int(S * began), int(S * events[-1][3])]
    return made


def around(*seconds: float) -> Around:
    return Around(*(int(S * second) for second in seconds))


FIRST = (
    around(0, 1, 3, 15, 17, 18),
    recording(4, ("0F0", 4, 4, 5), ("0F1", 5, 5, 6), ("0B0", 6, 9, 11), ("0B1", 11.5, 12, 14)),
)
SECOND = (
    around(0, 0.5, 1, 13, 15, 16),
    recording(3, ("1F0", 3, 5.5, 6.5), ("1F1", 6.5, 7, 8), ("1B0", 8, 8, 9), ("1B1", 9, 9, 11)),
)


def shares(*steps: tuple[Around, Recording], **more: float) -> Shares:
    return share_out([[row(*step)] for step in steps], **more)


def close(found: dict[str, float], **expected: float) -> None:
    assert found == pytest.approx({**dict.fromkeys(CATEGORIES, 0.0), **expected})


def test_two_ranks_of_one_step_as_worked_out_by_hand() -> None:
    found = shares(FIRST, SECOND)
    # The window is 4 to 14. Packing between 11 and 11.5 is other; the optimizer comes after the window.
    close(
        found.seconds[0], forward=2, backward=4, waiting_steady=3.5, data=2, optimizer=2,
        other=1 + 1 + 0.5 + 1 + 1,
    )  # fmt: skip
    # Rank 1 waits from 3, but the window begins at 4; what it does until 14 is drain, its optimizer too.
    close(
        found.seconds[1], forward=2, backward=3, waiting_start=1.5, waiting_steady=0.5, waiting_drain=3,
        data=0.5, optimizer=1, other=0.5 + 2 + 1 + 1,
    )  # fmt: skip
    assert found.makespan == pytest.approx(10)
    assert found.idle == pytest.approx([4, 5])
    assert found.bubble == pytest.approx(9 / 20)
    assert found.step == pytest.approx([18, 16])
    assert found.window_end == 14 * S
    for seconds, step in zip(found.seconds, found.step, strict=True):
        assert sum(seconds.values()) == pytest.approx(step)


def test_a_rank_that_goes_on_before_the_others_are_through_is_still_in_their_drain() -> None:
    early = (
        around(10, 11, 12, 30, 31, 32),
        recording(13, ("1F0", 13, 20, 21), ("1B0", 21, 21, 22)),
    )
    late = (
        around(18, 19, 19, 30, 31, 32),
        recording(19, ("0F0", 19, 19, 20), ("0B0", 20, 22, 23)),
    )
    found = shares(late, early, window_end=14.5 * S)
    assert found.seconds[1]["waiting_drain"] == pytest.approx(4.5 + 1)
    assert found.seconds[1]["data"] == 0
    assert found.seconds[1]["other"] == pytest.approx((19 - 14.5) + (30 - 23) + 1)
    assert found.seconds[1]["waiting_start"] == pytest.approx(1)
    assert found.seconds[0]["waiting_drain"] == 0
    for seconds, step in zip(found.seconds, found.step, strict=True):
        assert sum(seconds.values()) == pytest.approx(step)


def test_slow_data_of_a_rank_is_not_its_waiting_for_a_message() -> None:
    slow = (
        around(0, 1, 6, 15, 15, 16),
        recording(6.5, ("1F0", 6.5, 7, 8), ("1B0", 8, 8, 9)),
    )
    quick = (
        around(0, 1, 1, 15, 15, 16),
        recording(1, ("0F0", 1, 1, 2), ("0B0", 2, 9, 10)),
    )
    found = shares(quick, slow)
    assert found.seconds[1]["data"] == pytest.approx(5)
    assert found.seconds[1]["waiting_start"] == pytest.approx(0.5)
    assert found.idle[1] == pytest.approx(7)


def test_the_halves_of_a_backward_are_kinds_of_their_own() -> None:
    step = (
        around(0, 0, 0, 9, 9, 9),
        recording(0, ("0F0", 0, 0, 1), ("0I0", 1, 1, 3), ("0W0", 3, 3, 6)),
    )
    close(shares(step).seconds[0], forward=1, input_gradient=2, weight_gradient=3, other=3)


def test_clocks_of_other_ranks_count_from_the_first_one_s() -> None:
    moved = tuple(
        [value + (5 * S if index < 9 else 0) for index, value in enumerate(row(*SECOND))]
    )  # fmt: skip
    assert row(*SECOND, offset=-5 * S) == list(moved)


def test_steps_add_up_each_in_its_own_window() -> None:
    second = replace(FIRST[0], **{name: value + 18 * S for name, value in vars(FIRST[0]).items()})
    run = FIRST[1]
    later = Recording(1, run.actions)
    later.position, later.bounds = run.position, [bound + 18 * S for bound in run.bounds]
    later.asked, later.started, later.ended = (
        [time + 18 * S for time in times] for times in (run.asked, run.started, run.ended)
    )
    once = share_out([[row(*FIRST)]])
    twice = share_out([[row(*FIRST), row(second, later)]])
    assert twice.makespan == pytest.approx(2 * once.makespan)
    assert twice.seconds[0] == pytest.approx({name: 2 * s for name, s in once.seconds[0].items()})


PLAN = get_schedule("1F1B").plan(2, 4)


def measurement(plan: Plan = PLAN, steps: int = 1, **costs: float) -> Measurement:
    found = shares(FIRST, SECOND)
    seconds, step, makespan = mean_of([found, found])
    times = {(int(key[1]), key[0]): value for key, value in costs.items()}
    return Measurement(plan, steps, seconds, step, makespan, times, 8, 0, [0.0, 0.0])


def test_equal_stages_have_the_schedule_s_bubble_and_uneven_ones_more() -> None:
    even = IdealBubble.of(PLAN, {(0, "F"): 1, (1, "F"): 1, (0, "B"): 2, (1, "B"): 2})
    assert (even.bubble, even.bubble_equal_stages) == pytest.approx((0.2, 0.2))
    uneven = IdealBubble.of(PLAN, {(0, "F"): 1, (1, "F"): 3, (0, "B"): 2, (1, "B"): 6})
    assert uneven.bubble == pytest.approx(simulate(PLAN, Costs([1, 3], [1, 3], [1, 3])).bubble)
    assert uneven.bubble > 0.3
    assert uneven.bubble_equal_stages == pytest.approx(0.2)
    assert uneven.slowest == 1


def test_what_is_logged_has_the_plan_s_kinds_only() -> None:
    values = measurement(F0=1, F1=1, B0=2, B1=2).values(["stage_0", "stage_1"])
    assert "stage_0/backward_s" in values
    assert "stage_0/input_gradient_s" not in values
    split = measurement(get_schedule("ZBH1").plan(2, 4), F0=1, F1=1, I0=1, I1=1, W0=1, W1=1)
    values = split.values(["stage_0", "stage_1"])
    assert "stage_0/backward_s" not in values
    assert "stage_1/weight_gradient_s" in values
    assert values["bubble_fraction"] == pytest.approx(9 / 20)
    assert values["step_time_s"] == pytest.approx(17)
    assert values["makespan_s"] == pytest.approx(10)


def test_measurements_add_and_costs_are_weighed_by_steps() -> None:
    both = measurement(F0=1, steps=1) + measurement(F0=4, steps=2)
    assert (both.steps, both.samples, both.makespan) == (3, 16, 20)
    assert both.costs[0, "F"] == pytest.approx(3)
    assert both.bubble == pytest.approx(9 / 20)
