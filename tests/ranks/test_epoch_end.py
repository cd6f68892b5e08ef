"""The pattern that is everywhere: a step appends, a hook at the epoch's end stacks and logs."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_pipeline import PipelineStrategy
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

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


def fit(stages: int | None, folder: str) -> dict[str, float]:
    module = Stacks()
    strategy: Any = PipelineStrategy(stages=stages, num_microbatches=3) if stages else "auto"
    run = pl.Trainer(
        accelerator="cpu", devices=stages or 1, strategy=strategy, max_epochs=3, default_root_dir=folder,
        callbacks=[EarlyStopping("stacked", patience=10)],
    )  # fmt: skip
    run.fit(module, loader(24), loader(24, seed=5))
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("stages", [2, 3])
def test_what_a_hook_at_the_epochs_end_logs_is_that_of_one_device_on_every_rank(
    ranks: Ranks, tmp_path: Path, stages: int
) -> None:
    expected = fit(None, str(tmp_path / "one"))
    assert {"stacked", "batches", "error_now", "mean_of_losses"} <= set(expected)
    for found in ranks(stages)(fit, stages, str(tmp_path / "stages")):
        assert found == pytest.approx(expected, rel=1e-6)


class Keeps(Regression):
    """Hooks at the end of epochs work with lists of all kinds, and later steps with what they set."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.rows: list[dict[str, Tensor]] = []
        self.arrays: list[Any] = []
        self.classes: list[int] = []
        self.train_losses: list[float] = []
        self.best, self.scale = float("inf"), 1.0
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step((batch[0] * self.scale, batch[1]), batch_idx)
        self.train_losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = torch.nn.functional.mse_loss(out, batch[1])
        self.losses.append(loss)
        self.rows.append({"out": out, "target": batch[1]})
        self.arrays.append(out.cpu().numpy())
        self.classes.extend(out.argmax(-1).tolist())
        return loss

    def on_validation_epoch_end(self) -> None:
        loss = torch.stack(self.losses).mean()
        out = torch.cat([row["out"] for row in self.rows])
        target = torch.cat([row["target"] for row in self.rows])
        self.log("epoch_loss", loss, prog_bar=True)
        self.log("of_all", torch.nn.functional.mse_loss(out, target))
        self.log("of_arrays", float(numpy.concatenate(self.arrays).std()))
        self.log("first_class", self.classes.count(0) / len(self.classes))
        self.best = min(self.best, float(loss))
        for kept in (self.losses, self.rows, self.arrays, self.classes):
            kept.clear()

    def on_train_epoch_end(self) -> None:
        mean = sum(self.train_losses) / len(self.train_losses)
        self.scale = 1 / (1 + mean)  # the next step reads it, on the first stage
        self.seen += [mean, float(len(self.train_losses)), self.best]
        self.train_losses.clear()


class Reads(pl.Callback):
    """Looks at what a step left, before the module's own hook does."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Keeps)
        self.seen += [float(torch.stack(pl_module.losses).sum()), float(len(pl_module.classes))]


def fit_keeps(num_microbatches: int | None, folder: str) -> dict[str, Any]:
    module, reads = Keeps(), Reads()
    pipeline = {"stages": 2, "num_microbatches": num_microbatches} if num_microbatches else None
    run = trainer(pipeline, max_epochs=3, callbacks=[reads], writes=folder)
    run.fit(module, loader(), loader(seed=5))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    own = [*module.seen, module.best, module.scale, float(len(module.losses)), *reads.seen]
    return {"logged": logged, "own": own, "weights": weights(module)}


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_hooks_at_the_epochs_end_run_whole_on_every_rank(
    ranks: Ranks, tmp_path: Path, num_microbatches: int
) -> None:
    expected = fit_keeps(None, str(tmp_path / "one"))
    for found in ranks(2)(fit_keeps, num_microbatches, str(tmp_path / "two")):
        assert found["logged"] == pytest.approx(expected["logged"], rel=1e-9)
        assert found["own"] == pytest.approx(expected["own"], rel=1e-9)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], value)


class Held:
    """What no other rank can be told."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Holds(Regression):
    """A list of such."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.held.append(Held(self.net(batch[0]).mean()))

    def on_validation_epoch_end(self) -> None:
        self.log("held", torch.stack([one.value for one in self.held]).mean())
        self.held.clear()


def fit_holds(stages: int | None) -> tuple[float, list[str]]:
    run = trainer({"stages": stages, "num_microbatches": 1} if stages else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Holds(), loader(), loader(seed=5))
    said = [str(one.message) for one in caught if "run whole where the last stage is" in str(one.message)]
    return float(run.callback_metrics["held"]), said


def test_what_cannot_be_told_is_logged_from_the_last_stage_and_said_once(ranks: Ranks) -> None:
    expected, _ = fit_holds(None)
    (first, said), (second, _) = ranks(2)(fit_holds, 2)
    assert first == second == pytest.approx(expected)
    assert len(said) == 1
    assert said[0].startswith("held: ")
