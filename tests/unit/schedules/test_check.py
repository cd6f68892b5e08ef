import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules import OneFOneB, Plan, check, communicate
from lightning_pipeline.schedules.plans.check import rendezvous


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the plan has no ranks"),
        ("0F0 0F0 0B0", "rank 0, position 1: 0F0 is there again, after position 0"),
        ("0F0 0B0 0I0", "rank 0, position 2: 0I0 is there although 0B0 did that already, after position 1"),
        ("0F0 0I0 0B0", "rank 0, position 2: 0B0 is there although 0I0 did that already"),
        ("0B0 0F0", "rank 0, position 0: 0B0 comes before 0F0"),
        ("0F0 0W0 0I0", "rank 0, position 1: 0W0 comes before 0I0"),
        ("0F0 0I0", "rank 0, position 2 (its end): 0W0 is missing, only 0I0 is there"),
        ("0F0 0F1 0B1", "rank 0, position 3 (its end): the backward 0B0 is missing"),
        ("0F0 0B0 1F0 1B0\n1F1 0F1", "rank 1, position 0: 1F1 belongs to stage 1, which rank 0 holds"),
        ("0F0 0B0\n2F0 2B0", "no rank of this plan holds stage 1"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0", "rank 1, position 2 (its end): 1F1 is missing"),
        ("0F0 1F0 0B0 1B0", "rank 0, position 2: 0B0 waits for the backward 1B0 or 1I0"),
        (
            "0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1",
            "rank 0, position 1: 0B0 waits for the backward 1B0 or 1I0; rank 1, position 0: 1F1 waits for 0F1",
        ),
    ],
)
def test_an_offence_is_named_by_rank_and_position(text: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(complaint)):
        check(Plan.parse(text))


def test_a_rank_without_work_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 1 has no actions"):
        check(Plan([Plan.parse("0F0 0B0")[0], ()]))


def test_a_plan_of_forwards_alone_is_an_evaluation() -> None:
    check(Plan.parse("0F0 0F1\n1F0 1F1"))


def test_messages_stand_at_one_point_of_a_global_order() -> None:
    assert str(communicate(OneFOneB().plan(2, 2))) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )


def test_stages_of_one_rank_exchange_no_messages() -> None:
    plan = Plan.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert str(communicate(plan)[1][1]) == "1F0"
    assert sum("SEND" in str(plan) for plan in communicate(plan)[0]) == 2


def test_sends_that_block_on_each_other_are_a_deadlock() -> None:
    crossed = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
    crossed += "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    with pytest.raises(
        ScheduleError, match="with blocking sends no rank can go on: rank 0, position 3: 0SEND_F1"
    ):
        check(Plan.parse(crossed))


def test_a_message_sent_before_its_result_is_a_deadlock() -> None:
    with pytest.raises(ScheduleError, match="rank 0, position 0: 0SEND_F0"):
        check(Plan.parse("0SEND_F0 0F0\n1RECV_F0 1F0"))


def test_a_result_that_never_travels_is_missed() -> None:
    with pytest.raises(ScheduleError, match="rank 1, position 0: 1F0"):
        check(Plan.parse("0F0\n1F0 1SEND_F0\n2RECV_F0 2F0"))


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 4), st.integers(1, 5))
def test_what_the_check_lets_pass_runs_without_buffers_and_the_rest_is_refused(
    random, ranks, microbatches
) -> None:
    lists = [list(actions) for actions in OneFOneB().plan(ranks, microbatches)]
    for _ in range(random.randrange(4)):
        shuffled = random.choice(lists)
        a, b = random.randrange(len(shuffled)), random.randrange(len(shuffled))
        shuffled[a], shuffled[b] = shuffled[b], shuffled[a]
    plan = Plan(lists)
    try:
        check(plan)
    except ScheduleError as error:
        assert re.search(r"rank \d+, position \d+", str(error))
    else:
        rendezvous(communicate(plan))
