"""Tensors made in the form of another one (`type_as`, `to`, `expand_as`), of which nothing but that is taken."""

import warnings

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.ranks.lightning_cases import TARGETS, assert_same, fit
from tests.unit.split.test_logged_as_one import WAYS
from tests.unit.split.test_losses_by_sample import BySample

pytestmark = pytest.mark.usefixtures("no_group_is_left")


def lengths(out, y):
    """A mask of padding, as speech models make it."""
    lengths = (y[:, 0] > 0).long() + 1
    mask = (torch.arange(TARGETS).type_as(lengths)[None] < lengths[:, None]).type_as(out)
    return ((out - y).square() * mask).sum() / mask.sum()


def weights_in_form_of_the_batch(out, y):
    mask = (y * torch.arange(1, TARGETS + 1).to(y) > 0).to(y)
    return ((out - y).square() * mask).sum() / mask.sum()


def weights_in_form_of_the_loss(out, y):
    loss = mse_loss(out, y)
    weights = torch.arange(TARGETS).to(loss)
    return loss + ((out - y).square() * weights.expand_as(out)).mean()


def weights_in_form_of_a_count(out, y):
    mask = (y > 0).type_as(out)
    count = mask.sum()
    return ((out - y).square() * mask * torch.full((TARGETS,), 2).to(count)).sum() / count


FUNCTIONS = [lengths, weights_in_form_of_the_batch, weights_in_form_of_the_loss, weights_in_form_of_a_count]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_loss_with_it_is_one_devices(function, way):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one device")
        found = fit(WAYS[way], lambda: BySample(function), max_epochs=2)
    assert_same(found, fit(None, lambda: BySample(function), max_epochs=2))
