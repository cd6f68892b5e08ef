"""What a plan predicts is what the monitors measure in a run."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor
from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.workload import StageTimes
from lightning_pipeline.forecast.workload import unit_times as measure
from tests.naps import Nap
from tests.ranks import lightning_cases as cases

pytestmark = pytest.mark.quiet  # times are compared with a clock

LINK = Assumptions(latency=1e-3)  # what a message takes when all test files run at once
NAPS = (0.02, 0.01, 0.03, 0.02)  # of a forward; an input half naps as long, and so does a backward


class Sleeper(nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds: float, inputs: int) -> None:
        super().__init__()
        self.inner, self.seconds = nn.Linear(inputs, 32), seconds

    def forward(self, tensor: Tensor) -> Tensor:
        return Nap.apply(torch.tanh(self.inner(tensor)), self.seconds, self.seconds)


class Sleepers(pl.LightningModule):
    """Layers that nap."""

    def __init__(self) -> None:
        super().__init__()
        inputs = (cases.FEATURES, 32, 32, 32)
        self.layers = nn.ModuleList(map(Sleeper, NAPS, inputs)).double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        hidden = batch[0]
        for layer in self.layers:
            hidden = layer(hidden)
        loss = hidden.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Readings(pl.Callback):
    """The smallest of what the monitors logged in each step: what else runs here only makes it more."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        for name, value in trainer.callback_metrics.items():
            if trainer.global_step > 1:
                self.seen[name] = min(float(value), self.seen.get(name, float("inf")))


OPTIONS = {"stages": 2, "num_microbatches": 4, "partition": "uniform"}


@pytest.fixture(scope="module")
def predicted(ranks: Any) -> dict[str, Any]:
    """A plan has every schedule, and stages are measured once for all of them."""
    guesses: dict[str, Any] = ranks(1)(predict, group=False)[0]
    return guesses


def predict() -> dict[str, Any]:
    loader = cases.loader(samples=40, batch_size=8)
    # the smallest, as of the steps; nothing beside it, for ranks that sleep do not slow each other down
    alone = {"median": min, "copies_beside": lambda count, work: nullcontext()}
    smallest = mock.patch.object(StageTimes, "drawn", return_value={})
    with mock.patch.multiple(measure, WARM_UP=1, PASSES=1, ROUNDS=3, **alone), smallest:
        plan = PipelineStrategy(**OPTIONS).plan(
            Sleepers(), next(iter(loader)), measure=True, assumptions=LINK
        )
    return {
        guess.name: {
            "step": guess.step, "bubble": guess.bubble,
            "activations": [rank.activations / 2**30 for rank in guess.memory],
            "parameters": [rank.parameters / 2**30 for rank in guess.memory],
        }
        for guess in plan.predictions
    }  # fmt: skip


def measured(schedule: str) -> dict[str, float]:
    readings = Readings()
    monitors = [BubbleMonitor(every_n_steps=1), StageMemoryMonitor(every_n_steps=1), readings]
    trainer = cases.trainer({**OPTIONS, "schedule": schedule}, max_epochs=1, callbacks=monitors)
    trainer.fit(Sleepers(), cases.loader(samples=40, batch_size=8))
    return readings.seen


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBH1"])
def test_step_bubble_and_memory_are_as_predicted(
    ranks: Any, predicted: dict[str, Any], schedule: str
) -> None:
    guess, seen = predicted[schedule], ranks(2)(measured, schedule, group=False)[0]
    assert guess["step"] == pytest.approx(seen["pipeline/makespan_s"], rel=0.1)
    assert guess["bubble"] == pytest.approx(seen["pipeline/bubble_fraction"], rel=0.1)
    for stage in (0, 1):
        name = f"pipeline/stage_{stage}"
        assert guess["activations"][stage] == pytest.approx(seen[f"{name}/activations_gib"], rel=0.02)
        assert guess["parameters"][stage] == pytest.approx(seen[f"{name}/parameters_gib"], rel=0.02)
