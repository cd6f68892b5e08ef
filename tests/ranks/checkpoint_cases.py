"""Runs that save and resume, and what of them must be equal bit by bit."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.ranks.lightning_cases import Regression, loader, trainer, weights


class Noisy(Regression):
    """AdamW in two groups, a schedule per step, dropout, a buffer on the first stage, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        del self.error
        self.save_hyperparameters({"width": 8})
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8),
            nn.Tanh(), nn.Linear(8, 3),
        ).double()  # fmt: skip
        self.net[5].weight = self.net[3].weight
        self.steps: list[tuple[int, float]] = []
        self.batches: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(float(batch[0].sum()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append((self.trainer.global_step, float(self.trainer.callback_metrics["train_loss_step"])))

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        optimizer = torch.optim.AdamW(
            [{"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
             {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0}], lr=0.01,
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=60)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def state_of(run: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Adam's state of this rank's parameters, by name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state: dict[str, Any] = {}
    for parameter, values in run.optimizers[0].state.items():
        state.update({f"{names[id(parameter)]}.{key}": value.clone() for key, value in values.items()})
    return state


def fit_noisy(pipeline: dict[str, Any] | None, *, resume: str | None = None, save: str | None = None,
              **options: Any) -> dict[str, Any]:  # fmt: skip
    """Fit, and give all that must not depend on a resume in between."""
    pl.seed_everything(11, verbose=False)
    module = Noisy()
    data = loader(40, batch_size=4, shuffle=True, drop_last=True)
    run = trainer(pipeline, **{"max_epochs": -1, **options})
    run.fit(module, data, ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    of_first = pipeline is None or run.strategy.replica_index == 0  # as with DDP, the others' are not kept
    buffers = {name: value.clone() for name, value in module.named_buffers() if of_first}
    return {
        "weights": {**weights(module), **buffers},
        "optimizer": state_of(run, module),
        "rates": [group["lr"] for group in run.optimizers[0].param_groups],
        "steps": module.steps,
        "batches": module.batches,
        "logged": {k: float(v) for k, v in run.callback_metrics.items() if not k.endswith("epoch")},
        "step": run.global_step,
    }


def saving_every(folder: str, steps: int) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=steps, save_top_k=-1)


def fit_and_save(pipeline: dict[str, Any], folder: str, steps: int, *every: int) -> dict[str, Any]:
    savers = [saving_every(folder, number) for number in every]
    return fit_noisy(pipeline, max_steps=steps, enable_checkpointing=True, callbacks=savers)


def fit_resumed(pipeline: dict[str, Any] | None, path: str, steps: int) -> dict[str, Any]:
    return fit_noisy(pipeline, resume=path, max_steps=steps)


def assert_equal(found: Any, expected: Any) -> None:
    for part in ("weights", "optimizer"):
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            assert isinstance(value, Tensor)
            assert torch.equal(found[part][name], value), (part, name)
    assert found["rates"] == expected["rates"]
    assert found["logged"] == expected["logged"]
    assert found["steps"] == expected["steps"][-len(found["steps"]) :]
    assert found["batches"] == expected["batches"][-len(found["batches"]) :]
    assert found["step"] == expected["step"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
