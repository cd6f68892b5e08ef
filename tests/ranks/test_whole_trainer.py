"""With what every user has on, such as progress bar, logger and checkpoints, a run is that of one device."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricTracker

from lightning_pipeline.run.setup import too_small
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]

TWO = {"stages": 2, "num_microbatches": 2}


class Measured(Regression):
    """Logs torchmetrics objects on epoch in its training step, as most project templates do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric().set_dtype(torch.float64)
        self.train_error = MeanSquaredError().set_dtype(torch.float64)
        self.tracked = MetricTracker(MeanMetric().set_dtype(torch.float64), maximize=False)
        self.seen: list[float] = []

    def on_validation_epoch_start(self) -> None:
        self.tracked.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.tracked.update(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("best", self.tracked.best_metric())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = nn.functional.mse_loss(out, batch[1])
        self.mean(loss, weight=len(batch[0]))
        self.train_error(out, batch[1])
        self.log("mean", self.mean, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        self.log("plain", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.train_error.compute()))


class AsksAlone(Callback):
    """Reads values on rank 0 alone, and where nobody expects it."""

    @rank_zero_only
    def on_train_epoch_end(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        assert torch.is_tensor(module.mean.compute())
        assert "mean" in run.callback_metrics

    @rank_zero_only
    def on_train_batch_end(self, run: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        assert torch.is_tensor(module.train_error.compute())


BARS: dict[str, Callable[[], list[Callback]]] = {
    "default": list,
    "tqdm": lambda: [TQDMProgressBar(refresh_rate=2)],
    "rich": lambda: [RichProgressBar()],
    "asks": lambda: [AsksAlone()],
}


def measured(pipeline: dict[str, Any] | None, folder: str, bar: str) -> Any:
    module = Measured()
    run = trainer(pipeline, writes=True, default_root_dir=folder, callbacks=BARS[bar]())
    run.fit(module, loader(24), loader(seed=4))
    return weights(module), {
        **{k: float(v) for k, v in run.callback_metrics.items()},
        **dict(zip(("first", "second"), module.seen, strict=True)),
    }


@pytest.mark.parametrize("bar", BARS)
def test_metrics_logged_on_epoch_in_training_need_nobody_else(ranks: Ranks, tmp_path: Path, bar: str) -> None:
    expected = measured(None, str(tmp_path / "one"), bar)
    for found in ranks(2)(measured, TWO, str(tmp_path / "two"), bar):
        assert_same(found, expected, 1e-6)  # a MeanMetric adds up in float32


def test_metrics_of_replicas_are_read_by_a_bar_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks(4)(measured, {**TWO, "data_parallel_size": 2}, str(tmp_path), "default")
    for found_weights, logs in others:
        reduced = {name: first[1][name] for name in ("mean", "train_error", "plain_epoch", "second")}
        assert_same((found_weights, {name: logs[name] for name in reduced}), (first[0], reduced))


def fast(pipeline: dict[str, Any] | None, folder: str, steps: Any) -> Any:
    module, run = Regression(), trainer(pipeline, writes=True, fast_dev_run=steps, default_root_dir=folder)
    run.fit(module, loader(24), loader(seed=4))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("steps", [True, 3])
def test_a_fast_run_takes_the_default_logger(ranks: Ranks, tmp_path: Path, steps: Any) -> None:
    expected = fast(None, str(tmp_path / "one"), steps)
    for found in ranks(2)(fast, TWO, str(tmp_path / "two"), steps):
        assert_same(found, expected)


class Loading(Regression):
    batch_size = 8

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)


def scaled(folder: str) -> int | None:
    run = trainer(TWO, writes=True, fast_dev_run=True, default_root_dir=folder)
    return Tuner(run).scale_batch_size(Loading())


def test_a_fast_run_passes_the_search_for_a_batch_size_over(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(scaled, str(tmp_path)) == [None, None]


def searched(pipeline: dict[str, Any] | None, folder: str) -> list[float]:
    module = Regression()
    run = trainer(pipeline, writes=True, default_root_dir=folder)
    tuner = Tuner(run)
    found = []
    for _ in range(2):
        search = tuner.lr_find(module, loader(24, shuffle=True), num_training=6, update_attr=False)
        found += search.results["loss"]
    return found


def test_the_search_for_a_learning_rate_with_the_default_logger_is_that_of_one_device(
    ranks: Ranks, tmp_path: Path
) -> None:
    pl.seed_everything(3, verbose=False)
    expected = searched(None, str(tmp_path / "one"))
    for found in ranks(2)(seeded_search, TWO, str(tmp_path / "two")):
        assert found == pytest.approx(expected, rel=1e-6)


def seeded_search(pipeline: dict[str, Any], folder: str) -> list[float]:
    pl.seed_everything(3, verbose=False)
    found = searched(pipeline, folder)
    assert not [one.name for one in threading.enumerate() if "lightning_pipeline" in one.name]
    return found


class Keeps(Callback):
    """What a logger would get."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}

    def on_train_end(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        self.rates = {name: float(v) for name, v in run.logged_metrics.items() if "per_sec" in name}


class Slow(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)  # so that a batch takes about as long everywhere


def throughput(pipeline: dict[str, Any] | None, folder: str) -> Any:
    keeps, module = Keeps(), Slow()
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    run = trainer(
        pipeline, writes=True, default_root_dir=folder, callbacks=[monitor, keeps], max_epochs=2,
        limit_val_batches=0,
    )  # fmt: skip
    run.fit(module, loader(64))
    return keeps.rates


def test_throughput_counts_a_batch_once(ranks: Ranks, tmp_path: Path) -> None:
    one = throughput(None, str(tmp_path / "one"))
    rates, _ = ranks(2)(throughput, TWO, str(tmp_path / "two"))
    assert rates.keys() == one.keys()
    assert rates["train/device/samples_per_sec"] == pytest.approx(8 * rates["train/device/batches_per_sec"])
    both, *_ = ranks(4)(throughput, {**TWO, "data_parallel_size": 2}, str(tmp_path / "four"))
    assert both["train/samples_per_sec"] == pytest.approx(2 * both["train/device/samples_per_sec"])


class KeepsLines(CSVLogger):
    """What was logged, on every rank."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.lines: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append(dict(metrics))


def throughput_of_validation(pipeline: dict[str, Any] | None, folder: str) -> list[set[str]]:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    kept = KeepsLines(folder)
    run = trainer(pipeline, writes=True, logger=kept, callbacks=[monitor], log_every_n_steps=1)
    for _ in range(2):
        run.validate(Slow(), loader(64))
    return [set(line) for line in kept.lines if "validate/batches" in line]


def test_throughput_of_a_validation_counts_a_batch_once(ranks: Ranks, tmp_path: Path) -> None:
    one = throughput_of_validation(None, str(tmp_path / "one"))
    found, _ = ranks(2)(throughput_of_validation, TWO, str(tmp_path / "two"))
    assert "validate/device/batches_per_sec" in one[-1]
    assert found == one  # with several replicas there would be rates of all, beside a device's


class Uploads(CSVLogger):
    """As loggers of services have it."""

    _log_model = "all"


def test_a_run_says_once_what_it_does(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).outcomes(says, {"stages": 2}, str(tmp_path))
    assert (
        first.output.count("1F1B: 8 micro-batches (num_microbatches='auto') of a batch of 8, 2 stages") == 1
    )
    assert first.output.count("at equal stages 11% of the time is idle. Every rank sees") == 1
    assert first.output.count("a pipeline does not pay") == 1
    assert first.output.count("of the estimated cost and stays on one stage") == 1
    assert "num_microbatches" not in second.output
    assert first.output.count("Uploads(log_model=...) uploads checkpoints that are one file") == 1


class Uneven(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 3)).double()


def says(pipeline: dict[str, Any], folder: str) -> None:
    module, run = Uneven(), trainer(pipeline, logger=Uploads(folder))
    with patch.object(sys.modules[too_small.__module__], "_PAYS_FROM", 60.0):  # however slow the machine is
        run.fit(module, loader(24), loader(seed=4))
    run.validate(module, loader(seed=4), verbose=False)
    run.predict(module, loader(seed=4))
