"""Losses over the samples that a mask of the batch picks, by their places: one device's, and no warning."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.ranks.lightning_cases import assert_same
from tests.unit.split.test_logged_as_one import WAYS
from tests.unit.split.test_steps_as_written import Written, fitted

pytestmark = pytest.mark.usefixtures("no_group_is_left")


def by_mask(self, out, y, mask):
    return mse_loss(out[mask], y[mask])


def by_places(self, out, y, mask):
    places = mask.nonzero().squeeze(1)
    return mse_loss(out[places], y[places])


def by_places_of_a_tuple(self, out, y, mask):
    places = mask.nonzero(as_tuple=True)[0]
    return mse_loss(out[places], y[places])


def by_where(self, out, y, mask):
    return (out - y).square().mean(1)[torch.where(mask)[0]].mean()


def by_index_select(self, out, y, mask):
    return (out - y).square().mean(1).index_select(0, mask.nonzero().flatten()).mean()


def by_a_list(self, out, y, mask):
    places = [place for place, holds in enumerate(mask.tolist()) if holds]
    return mse_loss(out[places], y[places]) if places else out.sum() * 0


def where_there_are_some(self, out, y, mask):
    places = mask.nonzero().squeeze(1)
    return mse_loss(out[places], y[places]) if places.numel() else out.new_zeros((), requires_grad=True)


def always_the_first(self, out, y, mask):
    return mse_loss(out[[0]], y[[0]])


def a_weight_by_mask(self, out, y, mask):
    return mse_loss(out, y) + 0.1 * self.weight[self.kept_weights].square().sum()


def a_weight_by_masked_select(self, out, y, mask):
    return mse_loss(out, y) + 0.1 * self.weight.masked_select(self.kept_weights).square().mean()


PICKED = [
    by_mask, by_places, by_places_of_a_tuple, by_where, by_index_select, by_a_list, where_there_are_some,
    a_weight_by_mask, a_weight_by_masked_select,
]  # fmt: skip


class Picks(Written):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.arange(6, dtype=torch.float64))
        self.register_buffer("kept_weights", torch.tensor([True, False, True, True, False, True]))

    def step(self, out, y, mask, place, index):
        return self.function(self, out, y, mask)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", PICKED)
def test_a_loss_over_picked_samples_is_one_devices(function, way):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, logged, _ = fitted(WAYS[way], lambda: Picks(function))
    assert not [str(one.message) for one in said if "micro-batch" in str(one.message)]
    with warnings.catch_warnings(action="ignore"):
        expected, logs, _ = fitted(None, lambda: Picks(function))
    assert_same((found, {}), (expected, {}))
    assert logged == pytest.approx(logs, rel=1e-6)


def test_samples_at_places_that_are_always_the_same_are_not_taken_for_picked():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fitted(WAYS["two"], lambda: Picks(always_the_first))
    assert [one for one in said if "in another way than by adding up" in str(one.message)]
