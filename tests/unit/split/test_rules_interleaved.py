"""Several stages on one rank share one module: what a step does beside its result happens once."""

import copy

import pytest
import torch

from tests.unit.split.nets import Net, batch_of, seeded
from tests.unit.split.pipe import alone, assert_same, piped, split_arguments
from tests.unit.split.test_rules_inplace import InplaceResidual, IntoBatch, ViewAdd
from tests.unit.split.test_rules_parameters import GlueParameters, TiedHead
from tests.unit.split.test_rules_random import ManyDraws, Mixup, NumpyGenerator
from tests.unit.split.test_rules_states import (
    AnnealedFirst,
    HookOnUnit,
)
from tests.unit.split.test_rules_steps import Collecting, Logging, Metrics
from tests.unit.split.test_rules_values import Siamese, UNet

LOOPED = [[0, 2], [1, 3]]
V_SHAPE = [[0, 3], [1, 2]]


@pytest.mark.parametrize("ranks", [LOOPED, V_SHAPE], ids=["looped", "v-shape"])
@pytest.mark.parametrize(
    "kind",
    [Net, InplaceResidual, IntoBatch, ViewAdd, GlueParameters, TiedHead, HookOnUnit, Logging, Siamese, UNet],
)
def test_stages_of_one_rank_equal_one_process(kind, ranks):
    module = seeded(kind)
    outcome = piped(module, batch_of(), stages=4, ranks=ranks, steps=2)
    assert_same(outcome, alone(module, batch_of(), steps=2))


@pytest.mark.parametrize("kind", [ManyDraws, Mixup, NumpyGenerator])
def test_random_draws_do_not_depend_on_who_holds_the_stages(kind):
    module = seeded(kind)
    assert_same(
        piped(module, batch_of(), stages=4, ranks=LOOPED),
        piped(module, batch_of(), stages=4, ranks=[[0, 1, 2, 3]]),
    )


@pytest.mark.parametrize("ranks", [LOOPED, V_SHAPE, [[0, 1, 2, 3]]])
def test_metrics_and_lists_see_each_value_once(ranks):
    module = seeded(Metrics)
    reference = copy.deepcopy(module)
    for args, _ in split_arguments(batch_of(), 2)[0]:
        reference.training_step(*args)
    last = piped(module, batch_of(), stages=4, ranks=ranks).splits[-1].root
    for name in ("error", "early", "inputs"):
        torch.testing.assert_close(getattr(last, name).compute(), getattr(reference, name).compute())
    torch.testing.assert_close(last.both.compute(), reference.both.compute())


@pytest.mark.parametrize("ranks", [LOOPED, V_SHAPE, [[0, 1, 2, 3]]])
def test_lists_that_a_step_fills_are_filled_once(ranks):
    module = seeded(Collecting)
    reference = copy.deepcopy(module)
    with torch.no_grad():
        reference.validation_step(batch_of(), 0)
    outcome = piped(
        module, batch_of(), stages=4, ranks=ranks, step="validation_step", split_by="training_step"
    )
    last = outcome.splits[-1].root
    torch.testing.assert_close(last.outputs, reference.outputs)
    torch.testing.assert_close(last.best, reference.best)
    assert last.names == reference.names


@pytest.mark.parametrize("kind", [AnnealedFirst])
def test_what_each_stage_of_a_rank_does_is_left_once(kind):
    module = seeded(kind)
    found = piped(module, batch_of(), stages=4, ranks=LOOPED, steps=2)
    assert_same(found, alone(module, batch_of(), steps=2))
