"""Modules that are given the losses of tasks, one number for all samples, and weigh them."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")


class Uncertainty(nn.Module):
    """Weighs losses by what it learns of their noise."""

    def __init__(self):
        super().__init__()
        self.logs = nn.Parameter(torch.tensor([0.1, -0.2], dtype=torch.float64))

    def forward(self, losses):
        return sum(torch.exp(-log) * loss + log for log, loss in zip(self.logs, losses, strict=True))


class UnderACondition(Uncertainty):
    def forward(self, losses):
        total = 0
        for log, loss in zip(self.logs, losses, strict=True):
            if loss > 0.0:
                total += torch.exp(-log) * loss + log
        return total


class Squares(Uncertainty):
    def forward(self, losses):
        return sum(log * loss**2 for log, loss in zip(self.logs, losses, strict=True))


class Tasks(Regression):
    def __init__(self, kind):
        super().__init__()
        self.weigh = kind()

    def training_step(self, batch, batch_idx):
        made = self.net(batch[0])
        return self.weigh([mse_loss(made, batch[1]), made.pow(2).mean()])


class BesideNoModule(Tasks):
    """The same between units."""

    def training_step(self, batch, batch_idx):
        made, total = self.net(batch[0]), 0
        for loss in (mse_loss(made, batch[1]), made.pow(2).mean()):
            if loss > 0.0:
                total += loss
        return total


def fitted(pipeline, make, kind):
    module = make(kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(pipeline, limit_val_batches=0).fit(module, loader())
    return weights(module), {str(one.message) for one in told if "micro-batch" in str(one.message)}


@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize(
    ("make", "kind"), [(Tasks, Uncertainty), (Tasks, UnderACondition), (BesideNoModule, Uncertainty)]
)
def test_losses_that_a_module_weighs_are_one_devices_without_a_word(make, kind, num_microbatches):
    expected, _ = fitted(None, make, kind)
    found, told = fitted({"stages": 1, "num_microbatches": num_microbatches}, make, kind)
    assert_same((found, {}), (expected, {}))
    assert not told


def test_what_a_module_makes_of_losses_and_is_no_mean_is_warned_of():
    _, told = fitted({"stages": 1, "num_microbatches": 2}, Tasks, Squares)
    assert any("given one value for all samples" in one for one in told)
