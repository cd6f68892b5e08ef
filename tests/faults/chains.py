"""One link of a chain of runs that are stopped and resumed, each with other ranks and another schedule."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from tests.ranks.lightning_cases import Regression, loader

LAST = 12  # batches of a whole run
Seen = list[tuple[float, float]]


class Noted(Regression):
    """Writes down batch and loss of every training step; Adam, and a schedule by steps."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net.insert(3, nn.Dropout(dropout))
        self.seen: Seen = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Every rank has the loss of the whole batch."""
        self.seen.append((float(batch[0].sum()), float(outputs["loss"])))

    def configure_optimizers(self) -> Any:
        """Both have state that a checkpoint must bring back."""
        made = torch.optim.AdamW(self.parameters(), 0.02, amsgrad=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(made, 0.05, total_steps=2 * LAST)
        return [made], [{"scheduler": scheduler, "interval": "step"}]


def link(how: dict[str, Any], folder: str, stop: int, resume: int | None) -> tuple[Seen, dict[str, Tensor]]:
    """Train until step `stop`, from the checkpoint of step `resume`."""
    pl.seed_everything(5, verbose=False)
    module = Noted(how["dropout"])
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = PipelineStrategy(
        how["stages"],
        num_microbatches=how["microbatches"],
        schedule=how["schedule"],
        stages_per_rank=how["per_rank"],
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=how["stages"], strategy=strategy, max_steps=stop, logger=False,
        callbacks=[saver], enable_progress_bar=False, enable_model_summary=False,
        val_check_interval=how.get("interval", 2), check_val_every_n_epoch=how.get("every", 1),
        accumulate_grad_batches=how["accumulate"],
    )  # fmt: skip
    path = None if resume is None else str(Path(folder) / f"step={resume}.ckpt")
    workers: Any = {"num_workers": 1, "multiprocessing_context": "fork"} if how["workers"] else {}
    trainer.fit(module, loader(32, shuffle=True, **workers), loader(16, seed=4), ckpt_path=path)
    return module.seen, {name: p.detach().clone() for name, p in module.named_parameters()}


def compare(straight: tuple[Seen, dict[str, Tensor]], chained: tuple[Seen, dict[str, Tensor]]) -> str:
    """What differs first; empty when nothing does."""
    if [batch for batch, _ in chained[0]] != [batch for batch, _ in straight[0]]:
        return "batches differ"
    losses = [abs(a[1] - b[1]) for a, b in zip(chained[0], straight[0], strict=True)]
    weights = [float((chained[1][name] - value).abs().max()) for name, value in straight[1].items()]
    worst = max(*losses, *weights)
    return "" if worst == 0 else f"losses or weights differ by up to {worst:.1e}"
