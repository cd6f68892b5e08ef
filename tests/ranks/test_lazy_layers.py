"""Layers that learn their sizes from the first batch: made as on one device, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Lazy(Regression):
    """Lazy layers of both stages, one with buffers; counts its steps."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyLinear(8),
            nn.ReLU(),
            nn.LazyBatchNorm1d(),
            nn.Linear(8, 8),
            nn.LazyLinear(self.net[-1].out_features),
        ).double()
        self.steps = 0
        if unused:
            self.unused = nn.LazyLinear(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))


def fitted(pipeline: dict[str, Any] | None, checks: bool) -> tuple[Any, int, list[str]]:
    module = Lazy()
    run = trainer(pipeline, max_epochs=2, num_sanity_val_steps=2 if checks else 0)
    run.fit(module, loader(24, shuffle=checks), loader(8))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), module.steps, [type(layer).__name__ for layer in module.net]


@pytest.mark.parametrize("checks", [True, False])
def test_lazy_layers_begin_and_train_as_on_one_device(checks: bool, ranks: Ranks) -> None:
    """Their numbers are drawn in the first step, that of the sanity check where there is one."""
    expected, steps, names = fitted(None, checks)
    for found, counted, kinds in ranks(2)(fitted, {"stages": 2, "num_microbatches": 1}, checks):
        assert_same(found, expected)
        assert (counted, kinds) == (steps, names)
        assert "LazyLinear" not in kinds


def refused() -> str:
    with pytest.raises(SplitError) as caught:
        trainer({"stages": 2}, max_epochs=1).fit(Lazy(unused=True), loader(16))
    return str(caught.value)


def test_a_lazy_layer_that_the_step_does_not_call_is_refused_by_name(ranks: Ranks) -> None:
    for says in ranks(2)(refused):
        assert "'unused' of Lazy learn their sizes" in says
        assert "training_step do not call them" in says
