"""Random steps equal their reference, or are refused. `benchmarks/random_steps.py` runs more of them."""

import pytest

from tests.unit.split.programs import STATEMENTS, Program, outcome_of, random_program


# 1016: a reentrant region whose input needs no gradient is not trained
@pytest.mark.parametrize("seed", [*range(50), 1016])
def test_a_random_step_equals_its_reference_or_is_refused(seed: int) -> None:
    outcome_of(random_program(seed))


def test_most_of_them_run() -> None:
    assert [outcome_of(random_program(seed)) for seed in (0, 1, 2, 1016)] == ["equal"] * 4


@pytest.mark.parametrize("statement", sorted(set(STATEMENTS)))
def test_each_statement_alone_is_right(statement: str) -> None:
    unit = ("unit", 1)
    program = Program(("plain", "checkpoint", "in place", "plain", "plain"), (unit, (statement, 3), unit))
    assert outcome_of(program).startswith(("equal", "refused"))
