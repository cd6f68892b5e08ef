"""Modules that are fitted on a device of the tests.

They are in a file that does not import the device: what a step writes in files that its own imports from is put
back after a trace, and a device knows its memory by such a dictionary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression


class Residual(Regression):
    """Dropout, batch norm, constants made on `self.device`, and weights read between units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU(), nn.Dropout(0.2))
            for _ in range(4)
        ).double()
        self.net = nn.Linear(FEATURES, TARGETS).double()
        self.register_buffer("scale", torch.linspace(0.5, 1, FEATURES, dtype=torch.float64))
        self.gate = nn.Parameter(torch.full((FEATURES,), 0.3, dtype=torch.float64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h = batch[0] * self.scale + torch.arange(FEATURES, device=self.device) / 10
        assert self.blocks[0][0].weight.device.type == self.device.type == batch[0].device.type
        for block in self.blocks:
            h = h + self.gate * block(h)
        weight = torch.ones(len(h), 1, dtype=h.dtype, device=self.device)
        loss = (weight * (self.net(h) - batch[1]).square()).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("constant", 2.0)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        h = batch[0]
        for block in self.blocks:
            h = h + block(h)
        self.error.update(self.net(h), batch[1])
        self.log("val_error", self.error)


class Looks(Regression):
    """A layer whose code looks at values, so that its shapes are found by running it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * 2 if bool(self.linear.weight.sum() > -1e9) else x

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Layer()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(self.first(batch[0])), batch[1])


class Tied(Regression):
    """One weight on the first stage and on the last."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(FEATURES, FEATURES) for _ in range(4)]
        self.net = nn.Sequential(*layers, nn.Linear(FEATURES, TARGETS)).double()
        layers[3].weight = layers[0].weight


class Adam(Regression):
    """An optimizer with states."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)
