"""A project built as the most used template builds one: `net` and partials in hyper-parameters, metrics, rich bar."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichModelSummary,
    RichProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]
CLASSES = 3


class Classifier(pl.LightningModule):
    """Its arguments are a network, and recipes of an optimizer and a schedule."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = MulticlassAccuracy(CLASSES)
        self.val_acc = MulticlassAccuracy(CLASSES)
        self.test_acc = MulticlassAccuracy(CLASSES)
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch[0], batch[1].argmax(1)
        logits = self(x)
        return self.criterion(logits, y), logits.argmax(1), y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, predicted, targets = self.model_step(batch)
        self.train_loss(loss, weight=len(targets))
        self.train_acc(predicted, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, predicted, targets = self.model_step(batch)
        self.val_loss(loss, weight=len(targets))
        self.val_acc(predicted, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, predicted, targets = self.model_step(batch)
        self.test_loss(loss, weight=len(targets))
        self.test_acc(predicted, targets)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        watched = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": watched}


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES)
    ).double()


def project(pipeline: dict[str, Any] | None, folder: str) -> Any:
    pl.seed_everything(12345, workers=True, verbose=False)
    module = Classifier(
        net(), partial(torch.optim.Adam, lr=0.05, weight_decay=0.01),
        partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=0), False,
    )  # fmt: skip
    saves = ModelCheckpoint(
        folder, monitor="val/acc", mode="max", save_last=True, auto_insert_metric_name=False
    )
    run = trainer(
        pipeline, writes=True, default_root_dir=folder, max_epochs=3, min_epochs=1, deterministic=True,
        inference_mode=True, logger=CSVLogger(folder),
        callbacks=[
            saves, EarlyStopping("val/acc", mode="max", patience=100), RichModelSummary(max_depth=-1),
            RichProgressBar(), LearningRateMonitor(),
        ],
    )  # fmt: skip
    run.fit(module, loader(24), loader(seed=4))
    fitted = {name: float(value) for name, value in run.callback_metrics.items()}
    run.test(module, loader(seed=5), ckpt_path=run.checkpoint_callback.best_model_path, weights_only=False)
    tested = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), {**fitted, **tested}


def test_a_project_of_the_template_is_that_of_one_device(ranks: Ranks, tmp_path: Path) -> None:
    expected = project(None, str(tmp_path / "one"))
    pipeline = {"stages": 2, "num_microbatches": 2, "trust_checkpoint": True}
    for found in ranks(2)(project, pipeline, str(tmp_path / "two")):
        assert_same(found, expected, 1e-6)  # a MeanMetric adds up in float32
