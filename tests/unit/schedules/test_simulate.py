import pytest

from lightning_pipeline.errors import ConfigurationError, ScheduleError
from lightning_pipeline.schedules import Costs, GPipe, OneFOneB, Plan, draw, simulate
from tests.calls import calls_of


def test_times_of_a_small_plan() -> None:
    run = simulate(OneFOneB().plan(2, 2), Costs(1, 2, 1, send=0.5))
    assert [(str(t.action), t.rank, t.start, t.end) for t in run.actions] == [
        ("0F0", 0, 0.0, 1.0),
        ("0F1", 0, 1.0, 2.0),
        ("0B0", 0, 6.0, 9.0),
        ("0B1", 0, 10.0, 13.0),
        ("1F0", 1, 1.5, 2.5),
        ("1B0", 1, 2.5, 5.5),
        ("1F1", 1, 5.5, 6.5),
        ("1B1", 1, 6.5, 9.5),
    ]
    assert (run.makespan, run.span, run.busy) == (13.0, 13.0, (8.0, 8.0))
    assert run.bubble == run.bubble_span == pytest.approx(1 - 16 / 26)


def test_span_leaves_out_what_a_rank_waits_for_at_first() -> None:
    run = simulate(Plan.parse("0F0\n1F0"), Costs(1, 0, 0))
    assert (run.makespan, run.span, run.bubble, run.bubble_span) == (2.0, 1.0, 0.5, 0.0)


def test_a_number_is_shared_out_and_a_sequence_is_not() -> None:
    plan = Plan.parse("0F0 1F0 1B0 0B0")
    assert simulate(plan, Costs(2, 2, 2)).makespan == 6.0
    assert simulate(plan, Costs([2, 1], 2, 2)).makespan == 7.0
    assert simulate(plan, Costs([2, 1], 2, 2, send=5)).makespan == 7.0


def test_part_of_the_activations_stays_until_the_weight_half() -> None:
    plan = Plan.parse("0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2")
    assert simulate(plan, Costs(1, 1, 1)).peak_memory == (3.0,)
    assert simulate(plan, Costs(1, 1, 1, activation=2, weight_activation=0.5)).peak_memory == (4.5,)
    assert simulate(plan, Costs(1, 1, 1, weight_activation=0)).peak_memory == (2.0,)


def test_an_evaluation_holds_one_microbatch() -> None:
    assert simulate(Plan.parse("0F0 0F1 0F2"), Costs(1, 1, 1)).peak_memory == (1.0,)


def test_a_pair_waits_for_both_and_hands_over_at_its_end() -> None:
    single = Plan.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    paired = Plan.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1F1 1B1")
    assert simulate(single, Costs(1, 1, 1)).makespan == 9.0
    assert simulate(paired, Costs(1, 1, 1)).makespan == 12.0


def test_a_circle_is_named() -> None:
    with pytest.raises(ScheduleError, match="rank 0, position 1: 0B0 waits for the backward 1B0 or 1I0"):
        simulate(Plan.parse("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1"), Costs(1, 1, 1))
    with pytest.raises(ScheduleError, match="rank 0, position 0"):
        simulate(Plan.parse("0W0 0F0 0I0"), Costs(1, 1, 1))


def test_all_wrong_costs_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"forward=-1 has.*backward_input=\(\) has.*lengths differ"):
        Costs(-1, [], [1, 2])
    with pytest.raises(ConfigurationError, match="weight_activation is a part of activation"):
        Costs(1, 1, 1, weight_activation=2)
    with pytest.raises(ConfigurationError, match="for 2 stages, but the plan has 3"):
        simulate(OneFOneB().plan(3, 2), Costs(1, 1, 1, send=[1, 2]))


def test_each_hop_may_take_its_own_time() -> None:
    plan = OneFOneB().plan(3, 1)
    assert simulate(plan, Costs(1, 1, 0, send=[9, 2, 5])).makespan == 6 + 2 * (2 + 5)
    assert simulate(plan, Costs(1, 1, 0, send=[0, 2, 5])).makespan == 6 + 2 * (2 + 5)
    with pytest.raises(ConfigurationError, match="given for 3 stages, but the plan has 2"):
        simulate(GPipe().plan(2, 2), Costs([1, 2, 3], 1, 1))


def test_an_action_takes_some_20_calls() -> None:
    plan = OneFOneB().plan(32, 160)
    assert calls_of(lambda: simulate(plan, Costs(1, 1, 1))) < 22 * (32 * 160 * 2)


def test_a_picture_to_scale() -> None:
    assert draw(simulate(OneFOneB().plan(2, 3), Costs(1, 1, 1, send=1))) == (
        "rank 0 | F0 F1 .. .. .. .. B0 -- F2 B1 -- .. .. .. B2 --\n"
        "rank 1 | .. .. F0 B0 -- F1 B1 -- .. .. F2 B2 --"
    )


def test_a_picture_of_two_stages_per_rank_names_them() -> None:
    assert draw(Plan.parse("0F0 1F0 1I0 0I0 0W0 1W0")) == "rank 0 | 0F0 1F0 1I0 0I0 0W0 1W0"


def test_a_wide_picture_goes_on_below() -> None:
    assert draw(simulate(OneFOneB().plan(2, 2), Costs(1, 1, 1)), width=24) == (
        "rank 0 | F0 F1 .. .. B0\nrank 1 | .. F0 B0 -- F1\n\nrank 0 | -- .. B1 --\nrank 1 | B1 --"
    )


def test_columns_may_stand_for_more_time() -> None:
    run = simulate(Plan.parse("0F0 0B0\n1F0 1B0"), Costs([1, 4], [2, 2], [2, 2]))
    assert draw(run, column=4) == "rank 0 | F0 .. B0\nrank 1 | F0 B0"
