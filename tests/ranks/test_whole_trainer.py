"""With what every user has on, such as progress bar, logger and checkpoints, a run is that of one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError

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
        self.seen: list[float] = []

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
