"""How batches decide what a run does: how many there are, and into how many parts they are cut."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Normalised(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8, dtype=torch.float64))


def fit_normalised() -> dict[str, Tensor]:
    return fit({"stages": 2}, Normalised, max_epochs=1)[0]


def test_batch_norm_trains_with_a_number_of_micro_batches_that_it_can(ranks: Ranks) -> None:
    first, second = ranks(2)(fit_normalised)  # batches of 8 on 2 ranks are otherwise cut into 8
    assert_same((first, {}), (second, {}))


def only_validated() -> float:
    module, run = Regression(), trainer({"stages": 2}, limit_train_batches=0)
    before = weights(module)
    run.fit(module, loader(), loader(seed=4))
    assert_same((weights(module), {}), (before, {}))
    return float(run.validate(module, loader(seed=4), verbose=False)[0]["val_loss"])


def test_a_fit_without_training_batches_still_checks_validation(ranks: Ranks) -> None:
    first, second = ranks(2)(only_validated)
    run = trainer(None)
    (expected,) = run.validate(Regression(), loader(seed=4), verbose=False)
    assert first == second == pytest.approx(expected["val_loss"], rel=1e-10)
