"""`schedule="Auto"`: from costs measured in the first steps the order changes, the same on all ranks."""

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from tests.pool import Pool
from tests.ranks.lightning_cases import loader

pytestmark = pytest.mark.quiet  # times are compared with a clock

Ranks = Callable[[int], Pool]


class Slow(nn.Module):
    """A layer that takes its time, in the forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.layer(x))


class Uneven(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(Slow(0.0), Slow(0.004), nn.Linear(6, 3, dtype=torch.float64))
        self.losses: list[float] = []
        self.plans: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        steps = self.trainer.strategy._pipeline.stages.steps
        self.plans.append(str(steps.plans.plan(4, forward_only=False)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(schedule: str | None) -> tuple[list[float], list[str]]:
    module = Uneven()
    if schedule is None:
        module.on_train_batch_end = lambda outputs, batch, batch_idx: module.losses.append(
            float(outputs["loss"])
        )  # type: ignore[method-assign]
    strategy: Any = "auto"
    if schedule is not None:
        strategy = PipelineStrategy(stages=2, schedule=schedule, num_microbatches=4, partition=["net.1"])
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if schedule is None else 2, strategy=strategy, max_epochs=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(24))
    return module.losses, module.plans


def test_the_order_changes_at_a_step_boundary_and_the_numbers_stay(ranks: Ranks) -> None:
    expected, _ = fit(None)
    (losses, plans), (other_losses, other_plans) = ranks(2)(fit, "Auto")
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    assert losses == other_losses
    assert plans == other_plans
    assert len(set(plans[:6])) == 1
    assert len(set(plans[7:])) == 1
    assert plans[0] != plans[-1]
