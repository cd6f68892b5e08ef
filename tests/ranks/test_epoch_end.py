"""The pattern that is everywhere: a step appends, a hook at the epoch's end stacks and logs."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_pipeline import PipelineStrategy
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader

Ranks = Callable[[int], Pool]


class Stacks(Regression):
    """Nothing of it knows about stages."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.train_losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.train_losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(self.net(batch[0]).mean())

    def on_validation_epoch_end(self) -> None:
        self.log("stacked", torch.stack(self.outputs).mean(), prog_bar=True)
        self.log_dict({"batches": float(len(self.outputs)), "error_now": self.error.compute()})
        self.outputs.clear()

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_losses", sum(self.train_losses) / len(self.train_losses))
        self.train_losses = []


def fit(stages: int | None) -> dict[str, float]:
    module = Stacks()
    strategy: Any = PipelineStrategy(stages=stages, num_microbatches=3) if stages else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages or 1, strategy=strategy, max_epochs=3, logger=False,
        enable_checkpointing=False,
        callbacks=[EarlyStopping("stacked", patience=10)],
    )  # fmt: skip
    trainer.fit(module, loader(24), loader(24, seed=5))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("stages", [2, 3])
def test_what_a_hook_at_the_epochs_end_logs_is_that_of_one_device_on_every_rank(
    ranks: Ranks, stages: int
) -> None:
    expected = fit(None)
    assert {"stacked", "batches", "error_now", "mean_of_losses"} <= set(expected)
    for found in ranks(stages)(fit, stages):
        assert found == pytest.approx(expected, rel=1e-6)
