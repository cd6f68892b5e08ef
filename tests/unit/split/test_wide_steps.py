"""Random steps of more kinds equal their reference, or are refused; `benchmarks/random_steps.py` runs more."""

import pytest

from tests.unit.split.wide_programs import (
    WideProgram,
    whole_outcome_of,
    whole_program,
    wide_outcome_of,
    wide_program,
)


@pytest.mark.parametrize("seed", range(6))
def test_a_wide_step_equals_its_reference_or_is_refused(seed: int) -> None:
    wide_outcome_of(wide_program(seed))


@pytest.mark.parametrize("seed", range(6))
def test_a_loss_divided_by_counts_is_that_of_the_whole_batch_or_refused(seed: int) -> None:
    whole_outcome_of(whole_program(seed))


def test_a_weight_with_as_many_rows_as_the_batch_has_samples_is_not_cut_with_it() -> None:
    """In the second batch, in which its memory is another one than the layer was made with."""
    program = WideProgram(
        ("plain",) * 5, (("unit", 1), ("weight data", 1)), reentrant=False, stages=2, num_microbatches=2,
        split_backward=False, folded=False, sizes=(4, 4), depths=(1, 1), loss="mean",
    )  # fmt: skip
    assert wide_outcome_of(program) == "equal"


def test_a_weight_made_of_another_one_after_a_unit_leaves_the_rules_of_the_others_alone() -> None:
    """Seed 9043. The second of the two is on another stage, where nothing is known of what that makes of it."""
    program = WideProgram(
        ("plain",) * 5, (("weights of two", 9), ("eval unit", 5), ("unit", 8), ("weights of two", 6)),
        reentrant=False, stages=3, num_microbatches=2, split_backward=False, folded=False, sizes=(4,),
        depths=(0,), loss="mean",
    )  # fmt: skip
    assert wide_outcome_of(program) == "equal"
