"""`num_microbatches="auto"`."""

import lightning.pytorch  # noqa: F401  # registers the strategy, which imports what is tested here
import pytest

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.run.batch import Plans
from lightning_pipeline.schedules import ForwardOnly, Interleaved1F1B, OneFOneB


@pytest.mark.parametrize(
    ("size", "ranks", "at_least", "number"),
    [
        (16, 2, 1, 8),  # four per rank
        (8, 2, 1, 8),
        (8, 2, 2, 4),  # BatchNorm trains on no single sample
        (12, 4, 1, 12),
        (1, 4, 1, 1),
        (1, 4, 2, 1),
        (7, 2, 1, 7),
        (None, 4, 1, 1),  # cannot be split
        (16, 1, 1, 1),
    ],
)
def test_divides_the_batch_and_serves_the_schedule(
    size: int | None, ranks: int, at_least: int, number: int
) -> None:
    assert Plans(OneFOneB(), ranks).choose_number(size, at_least=at_least) == number


def test_a_schedule_that_wants_multiples_gets_one() -> None:
    assert Plans(Interleaved1F1B(2), 4).choose_number(12) % 4 == 0


def test_a_plan_without_backwards_is_for_evaluation_alone() -> None:
    plans = Plans(ForwardOnly(), 2)
    assert plans.plan(3, forward_only=True).num_microbatches == 3
    with pytest.raises(ScheduleError, match=r"ForwardOnly\(.*\) has no backwards, so that nothing would be"):
        plans.plan(3, forward_only=False)
