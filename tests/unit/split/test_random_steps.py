"""Random steps equal their reference, or are refused. `benchmarks/random_steps.py` runs more of them."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.unit.split.nets import Block, Net, batch_of, seeded
from tests.unit.split.pipe import alone, assert_same, piped
from tests.unit.split.programs import STATEMENTS, Program, outcome_of, random_program


# 1016: a reentrant region whose input needs no gradient is not trained. 53, 70, 93, 97: a unit in such a region
# asks whether gradients are recorded. 243: after it the mode changes. 371: an attribute is set after it is read.
# 1782: one device runs a region again in the mode that the step ends in.
@pytest.mark.parametrize("seed", [*range(50), 53, 70, 93, 97, 243, 310, 371, 1016, 1782])
def test_a_random_step_equals_its_reference_or_is_refused(seed: int) -> None:
    outcome_of(random_program(seed))


def test_most_of_them_run() -> None:
    assert [outcome_of(random_program(seed)) for seed in (0, 1, 2, 1016)] == ["equal"] * 4


def test_a_unit_that_computes_otherwise_without_gradients_is_refused_in_a_reentrant_region() -> None:
    for seed in (93, 97):
        assert "computes other values without gradients than with them" in outcome_of(random_program(seed))
    for seed in (243, 7213):  # 7213: a layer keeps in training what looks like what was kept in evaluation
        assert "such as after self.eval() at the end" in outcome_of(random_program(seed))
    assert [outcome_of(random_program(seed)) for seed in (53, 70, 371)] == ["equal"] * 3


def test_gradients_taken_in_a_region_that_draws_between_units_are_right() -> None:
    """They run the region again, inside the unit."""
    assert [outcome_of(random_program(seed)) for seed in (17, 717)] == ["equal"] * 2


class Asks(Block):
    """Computes something else without gradients, in a reentrant region of its own."""

    def forward(self, x: Tensor) -> Tensor:
        whole = super().forward
        result: Tensor = checkpoint(
            lambda v: whole(v) if torch.is_grad_enabled() else whole(v).sin(), x, use_reentrant=True
        )
        return result


@pytest.mark.parametrize("split_backward", [False, True])
def test_a_reentrant_region_inside_a_unit_is_that_of_one_device(split_backward: bool) -> None:
    module = seeded(lambda: Net(Asks))
    expected = alone(module, batch_of())
    assert_same(piped(module, batch_of(), 3, split_backward=split_backward), expected)


@pytest.mark.parametrize("statement", sorted(set(STATEMENTS)))
def test_each_statement_alone_is_right(statement: str) -> None:
    unit = ("unit", 1)
    program = Program(("plain", "checkpoint", "in place", "plain", "plain"), (unit, (statement, 3), unit))
    assert outcome_of(program).startswith(("equal", "refused"))


def test_a_stage_ends_where_how_many_rows_there_are_follows_from_values_of_others() -> None:
    """After its own layers a weight of the last stage has a part in what chooses rows."""
    statements = (("unit", 4), ("region of two", 0), ("parameter", 8), ("rows", 4))
    program = Program(
        ("plain",) * 5,
        statements,
        reentrant=False,
        stages=2,
        num_microbatches=1,
        split_backward=False,
        folded=False,
    )
    assert outcome_of(program) == "equal"
