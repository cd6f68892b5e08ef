"""One fit of two stages, for scripts of users whose further processes Lightning starts, and what it prints."""

import lightning.pytorch as pl

from lightning_pipeline import PipelineStrategy
from tests.ranks.lightning_cases import Regression, loader


def train(start_method: str) -> None:
    """Fit, and print what the weights and the loss are.

    Args:
        start_method: How the second process starts.
    """
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, strategy=PipelineStrategy(2, num_microbatches=2, start_method=start_method),
    )  # fmt: skip
    module = Regression()
    trainer.fit(module, loader(), loader(seed=4))
    print(totals(module, trainer), flush=True)


def totals(module: pl.LightningModule, trainer: pl.Trainer) -> str:
    """What a fit has come to, in a line."""
    total = sum(float(parameter.detach().abs().sum()) for parameter in module.parameters())
    return f"total {total:.6f} val_loss {float(trainer.callback_metrics['val_loss']):.6f}"
