"""Evaluation where Lightning, or the user, asks for `torch.inference_mode`; over gloo Lightning does not."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.loops.utilities as loops
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, loader


class Written(Regression):
    """Values that cross a cut are written in place, and what outlives a step is made inside of loops."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4))).double()
        self.head = nn.Linear(FEATURES, TARGETS).double()
        self.error = torchmetrics.MeanSquaredError()
        self.modes: list[bool] = []

    def on_validation_epoch_start(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    on_test_epoch_start = on_validation_epoch_start

    def outputs(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
            before = x.clone()
            x.mul_(0.5).add_(before.relu_())
        return self.head(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.outputs(batch[0]), batch[1])

    def evaluate(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
        outputs = self.outputs(batch[0])
        self.error.update(outputs, batch[1])
        self.total += (outputs - batch[1]).abs().sum()
        self.log(f"{name}_total", outputs.square().mean())
        self.log(f"{name}_error", self.error)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.modes.append(torch.is_inference_mode_enabled())
        self.evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.outputs(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum", self.total)


def evaluated(strategy: Any, folder: Path, around: AbstractContextManager[Any]) -> Any:
    """Logs, predictions, and the modes that the steps ran in."""
    pl.seed_everything(1, verbose=False)
    module = Written()
    run = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        default_root_dir=folder,
        max_epochs=2,
    )
    run.fit(module, loader(), loader(seed=4))
    with around:
        found = [run.validate(module, loader(seed=5)), run.test(module, loader(seed=6))]
        found.append(run.predict(module, loader(seed=7)))
    loop = run.validate_loop
    assert loop.inference_mode, "it is put back"
    return found, module.modes


def stages() -> PipelineStrategy:
    return PipelineStrategy(stages=1, stages_per_rank=3, schedule="LoopedBFS", num_microbatches=2)


def test_no_step_of_a_pipeline_runs_in_inference_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL the loops would ask for it."""
    expected, _ = evaluated("auto", tmp_path, nullcontext())
    monkeypatch.setattr(loops, "_distributed_is_initialized", lambda: False)
    found, modes = evaluated(stages(), tmp_path, nullcontext())
    assert modes
    assert not any(modes)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_user_may_ask_for_it(tmp_path: Path) -> None:
    expected, _ = evaluated("auto", tmp_path, torch.inference_mode())
    found, _ = evaluated(stages(), tmp_path, torch.inference_mode())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
