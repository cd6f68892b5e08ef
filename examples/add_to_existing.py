"""An ordinary LightningModule before and after: the only new thing is the `strategy=` argument.

`python examples/add_to_existing.py` trains over two stages; with the word `one` after it, on one device. What
both print at the end is the same.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy


class Classifier(LightningModule):
    """A deep network that tells whether a point lies inside a ring."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), *hidden, nn.Linear(64, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy, with the accuracy logged."""
        points, labels = batch
        logits = self.layers(points)
        loss = functional.cross_entropy(logits, labels)
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def ring_points(count: int = 2048) -> TensorDataset:
    """Points in a square, and whether each lies between two circles."""
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    radius = points.norm(dim=1)
    return TensorDataset(points, ((radius > 0.4) & (radius < 0.9)).long())


def main() -> None:
    """Train for two epochs and print what was logged in the last."""
    seed_everything(0)
    one_device = "one" in sys.argv[1:]
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1 if one_device else 2,
        strategy="auto" if one_device else PipelineStrategy(stages=2),  # the new argument
        logger=False,
        enable_checkpointing=False,
    )
    order = torch.Generator().manual_seed(0)  # of the samples, the same on one device and on two
    trainer.fit(Classifier(), DataLoader(ring_points(), batch_size=64, shuffle=True, generator=order))
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
