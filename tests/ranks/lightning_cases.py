"""Small LightningModules, their data, and a fit that runs as one device or as a rank of a pipeline."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_pipeline import PipelineStrategy

FEATURES, TARGETS = 6, 3


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, TARGETS),
    )  # fmt: skip


def loader(samples: int = 22, batch_size: int = 8, seed: int = 3, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, TARGETS, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **options)


class Regression(pl.LightningModule):
    """Logs in every way; float64; SGD with momentum."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = mlp().double()
        self.error = MeanSquaredError().set_dtype(torch.float64)
        self.lr = lr
        self.history: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": 2 * loss, "target": batch[1].mean()}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        out = self.net(batch[0])
        self.error.update(out, batch[1])
        self.log("val_error", self.error)
        self.log("val_loss", nn.functional.mse_loss(out, batch[1]))
        self.log("val_max", (out - batch[1]).abs().max(), reduce_fx="max")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def trainer(pipeline: dict[str, Any] | None, writes: bool | str = False, **options: Any) -> pl.Trainer:
    """A Trainer with bar and summary, as users have it; `pipeline=None` is one device.

    Only where it `writes` it has a logger and saves checkpoints, too: into a folder where it is one's name. Tests of
    logs, of hooks and of epochs' ends write.
    """
    if isinstance(writes, str):
        options["default_root_dir"] = writes
    given: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 2, "logger": bool(writes), "enable_checkpointing": bool(writes),
        "inference_mode": False, "log_every_n_steps": 1, **options,
    }  # fmt: skip
    if pipeline is None:
        return pl.Trainer(devices=1, **given)
    devices = pipeline["stages"] * pipeline.get("data_parallel_size", 1)
    return pl.Trainer(devices=devices, strategy=PipelineStrategy(**pipeline), **given)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def fit(
    pipeline: dict[str, Any] | None, make: Callable[[], pl.LightningModule] = Regression, **options: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights of the whole module after fit, and everything that was logged last."""
    module, run = make(), trainer(pipeline, **options)
    run.fit(module, loader(), loader(seed=4))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


def assert_same(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    (found_weights, found_logs), (weights_, logs) = found, expected
    assert found_logs.keys() == logs.keys()
    for name, value in logs.items():
        assert abs(found_logs[name] - value) <= tolerance * max(1.0, abs(value)), (
            name,
            found_logs[name],
            value,
        )
    assert list(found_weights) == list(weights_)
    for name, value in weights_.items():
        torch.testing.assert_close(found_weights[name], value, rtol=tolerance, atol=tolerance, msg=name)
