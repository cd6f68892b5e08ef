"""A loss, or a number beside its output, that a layer with weights works out of all its samples is said to be no mean.

What a layer leaves in an attribute that the step reads is that of the batch.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks.lightning_cases import TARGETS, Regression, assert_same, loader, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")

TWO = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2}
Loss = Callable[[Tensor, Tensor], Tensor]


class Criterion(nn.Module):
    """A loss with a weight of its own, so that it is a unit."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.loss = loss

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return self.loss(out * self.scale, y)


class WithCriterion(Regression):
    def __init__(self, loss: Loss, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.criterion = Criterion(loss)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.criterion(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return


def of_positive(out: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0.3).double()
    return ((out - y).square() * mask).sum() / mask.sum().clamp(min=1)


def contrast(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(out) @ F.normalize(y).T, torch.arange(len(y)))


def in_sum(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y, reduction="sum")


LOSSES: dict[str, tuple[Loss, str]] = {
    "quotient": (of_positive, "a number of all its samples that is no mean"),
    "contrast": (contrast, "a number of all its samples that is no mean"),
    "root": (lambda out, y: F.mse_loss(out, y).sqrt(), "a number of all its samples that is no mean"),
    "sum": (in_sum, "a sum over its samples"),
}


def said_of(kind: Callable[[], Regression], pipeline: dict[str, Any] | None) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = kind()
        run = trainer(pipeline, max_epochs=2)
        run.fit(module, loader(), loader(seed=4))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    found = [
        str(one.message) for one in told if "of its own" in str(one.message) or "gives " in str(one.message)
    ]
    return ((weights(module), logged), module.history), found


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_inside_a_layer_that_is_no_mean_is_said(name: str) -> None:
    loss, words = LOSSES[name]
    _, (said,) = said_of(lambda: WithCriterion(loss), TWO)
    assert f"criterion (Criterion) gives training_step {words}" in said


def test_a_mean_inside_a_layer_is_one_devices_without_a_word() -> None:
    (expected, _), _ = said_of(lambda: WithCriterion(F.mse_loss), None)
    (found, _), said = said_of(lambda: WithCriterion(F.mse_loss), TWO)
    assert_same(found, expected)
    assert said == []


def test_the_ways_out_are_one_devices_without_a_word() -> None:
    ways = {"sum": {"loss_weighting": "sum"}, "quotient": {"loss_over_batch": True, "schedule": "GPipe"}}
    for name, way in ways.items():
        kind = lambda loss=LOSSES[name][0]: WithCriterion(loss, lr=0.01)  # noqa: E731
        (expected, _), _ = said_of(kind, None)
        (found, _), said = said_of(kind, {"stages": 1, "num_microbatches": 2, **way})
        assert_same(found, expected)
        assert said == []


class Latent(nn.Module):
    """Keeps a mean and the values of its samples beside its output."""

    def __init__(self, balances: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(TARGETS, TARGETS).double()
        self.balances = balances
        self.distance, self.shares = torch.zeros(()), torch.zeros(())

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inner(hidden)
        self.shares = hidden.softmax(1)
        self.distance = hidden.square().sum(1).mean()
        if self.balances:  # as a router's loss for its experts
            chosen = F.one_hot(hidden.argmax(1), TARGETS).double()
            self.distance = (self.shares.mean(0) * chosen.mean(0)).sum()
        return hidden


class WithLatent(Regression):
    def __init__(self, balances: bool = False) -> None:
        super().__init__()
        self.latent = Latent(balances)
        self.factor = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.latent(self.net(batch[0]))
        spread = (self.latent.shares * self.latent.shares.log()).sum(1).mean()
        return F.mse_loss(out, batch[1]) + self.factor * self.latent.distance - 0.01 * spread

    def on_train_batch_end(self, *args: Any) -> None:
        distance = float(self.latent.distance)
        self.log("distance", distance)
        self.factor = 0.1 / (1 + distance)
        self.history += [distance, float(len(self.latent.shares)), float(self.latent.shares[0, 0])]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return


@pytest.mark.parametrize("number", [4, 2])
def test_what_a_layer_leaves_for_the_step_is_that_of_the_batch(number: int) -> None:
    (expected, history), _ = said_of(WithLatent, None)
    (found, seen), said = said_of(WithLatent, {**TWO, "num_microbatches": number})
    assert_same(found, expected)
    assert seen == pytest.approx(history, rel=1e-9)
    assert said == []


def test_a_balance_of_all_samples_that_a_layer_leaves_is_said_to_be_no_mean() -> None:
    _, (said,) = said_of(lambda: WithLatent(balances=True), TWO)
    assert "latent (Latent) gives training_step a number of all its samples that is no mean" in said
