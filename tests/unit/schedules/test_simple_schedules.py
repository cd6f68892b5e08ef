import itertools
import re

import pytest

from lightning_pipeline import schedules
from lightning_pipeline.errors import ConfigurationError, ScheduleError
from lightning_pipeline.schedules import (
    ForwardOnly,
    GPipe,
    OneFOneB,
    Plan,
    Schedule,
    available_schedules,
    check,
    get_schedule,
)

SIZES = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 9)))


class InV(Schedule):
    """Two stages per rank in V placement, for an even number of micro-batches."""

    stages_per_rank = 2

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        if num_microbatches % 2:
            raise ScheduleError("an even number of micro-batches is served")
        last = 2 * num_ranks - 1
        return Plan(
            [
                a
                for i in range(num_microbatches)
                for a in Plan.parse(f"{r}F{i} {last - r}F{i} {last - r}B{i} {r}B{i}")[0]
            ]
            for r in range(num_ranks)
        )


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ForwardOnly"])
def test_every_size_is_served(name: str, ranks: int, microbatches: int) -> None:
    plan = get_schedule(name).plan(ranks, microbatches)
    check(plan)
    assert (plan.num_ranks, plan.num_stages, plan.num_microbatches) == (ranks, ranks, microbatches)
    assert [plan.rank_of(stage) for stage in range(ranks)] == list(range(ranks))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=repr)
def test_backwards_go_in_the_order_of_the_microbatches(
    schedule: Schedule, ranks: int, microbatches: int
) -> None:
    for actions in schedule.plan(ranks, microbatches):
        assert [a.microbatch for a in actions if a.kind == "B"] == list(range(microbatches))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_1f1b_holds_as_many_microbatches_as_ranks_follow(ranks: int, microbatches: int) -> None:
    for rank, actions in enumerate(OneFOneB().plan(ranks, microbatches)):
        held = itertools.accumulate(1 if a.kind == "F" else -1 for a in actions)
        assert max(held) == min(microbatches, ranks - rank)


def test_forward_only_keeps_the_placement_and_serves_what_the_other_does_not() -> None:
    schedule = ForwardOnly(like=InV())
    assert schedule.stages_per_rank == 2
    plan = schedule.plan(2, 3)
    check(plan)
    assert str(plan) == "0F0 0F1 0F2 3F0 3F1 3F2\n1F0 2F0 1F1 2F1 1F2 2F2"


def test_placement_of_a_schedule_that_serves_no_size_says_why() -> None:
    class Never(Schedule):
        def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
            raise ScheduleError("no size is served")

    with pytest.raises(ScheduleError, match="no size is served"):
        Never().placement(2)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 4)])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ForwardOnly"])
def test_nothing_is_not_a_size(name: str, sizes: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match=f"{sizes[0]} ranks and {sizes[1]} micro-batches were asked for"):
        get_schedule(name).plan(*sizes)


@pytest.mark.parametrize("name", ["1F1B", "1f1b", "OneFOneB", " onefoneb", "Schedule1F1B"])
def test_names_ignore_case_and_know_torchs_spelling(name: str) -> None:
    assert isinstance(get_schedule(name), OneFOneB)


def test_the_names_are_these() -> None:
    assert available_schedules() == (
        *("1F1B", "Auto", "DualPipeV", "ForwardOnly", "FromTable", "FromTorch", "GPipe", "Interleaved1F1B"),
        *("InterleavedZeroBubble", "LoopedBFS", "VHalf", "VMin", "ZBH1", "ZBH2", "ZBV"),
    )


def test_what_is_public_is_listed_in_order() -> None:
    assert schedules.__all__ == sorted(schedules.__all__, key=lambda name: (not name.isupper(), name))
    assert len(schedules.__all__) == 27
    assert all(hasattr(schedules, name) for name in schedules.__all__)


def test_a_class_path_makes_a_schedule() -> None:
    schedule = get_schedule("lightning_pipeline.schedules.ForwardOnly", like=GPipe())
    assert repr(schedule) == "ForwardOnly(like=GPipe(), stages_per_rank=1)"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("2F2B", "there is no schedule '2F2B': known are 1F1B,"),
        ("no.such.Thing", "'no.such.Thing' cannot be imported"),
        ("lightning_pipeline.schedules.Nothing", "cannot be imported"),
        ("collections.Counter", "collections.Counter is not a schedule"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(name: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(complaint)):
        get_schedule(name)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="schedule 'GPipe' cannot be made with {'depth': 3}"):
        get_schedule("GPipe", depth=3)


def test_forward_only_can_be_like_a_plan() -> None:
    schedule = ForwardOnly(like=InV().plan(2, 2))
    assert (schedule.stages_per_rank, schedule.placement(2)) == (2, (0, 1, 1, 0))
    with pytest.raises(ScheduleError, match="the plan to be like has 2 ranks, not 3"):
        schedule.plan(3, 2)
