"""Random steps of more kinds equal their reference, or are refused; `benchmarks/random_steps.py` runs more."""

import pytest

from tests.unit.split.wide_programs import whole_outcome_of, whole_program, wide_outcome_of, wide_program


@pytest.mark.parametrize("seed", range(6))
def test_a_wide_step_equals_its_reference_or_is_refused(seed: int) -> None:
    wide_outcome_of(wide_program(seed))


@pytest.mark.parametrize("seed", range(6))
def test_a_loss_divided_by_counts_is_that_of_the_whole_batch_or_refused(seed: int) -> None:
    whole_outcome_of(whole_program(seed))
