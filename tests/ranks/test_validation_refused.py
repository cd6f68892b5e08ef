"""What no stage can run in a validation is refused before the first training step, not after an epoch."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from lightning_pipeline.errors import SplitError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}


class LooksInside(Regression):
    """Its validation branches on a value of a layer before it calls the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net[0](batch[0])
        self.net[2](hidden if hidden.sum() > 0 else -hidden)


def refused() -> int:
    module = LooksInside()
    with pytest.raises(SplitError, match=r"steers the code at .*before unit 'net\.2' is called"):
        trainer(TWO).fit(module, loader(), loader(seed=4))
    return module.trained


class SetLate(Regression):
    """Its validation reads what a hook before it sets."""

    def on_validation_start(self) -> None:
        self.scale = 2.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.scale * self.loss(batch))


def test_a_validation_that_cannot_be_cut_is_refused_before_training(ranks: Ranks) -> None:
    assert ranks(2)(refused) == [0, 0]


def test_a_validation_that_reads_what_a_hook_sets_runs(ranks: Ranks) -> None:
    expected = fit(None, SetLate)
    for found in ranks(2)(fit, TWO, SetLate):
        assert_same(found, expected)
