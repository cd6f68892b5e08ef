"""What a run on a GPU tells when a rank fails, and whether a model trains that one device cannot hold."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from gpu_cases import SAMPLES, Language, Layers, batches, trainer_of
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor

FAULTS = {
    "raise": ("planted",),
    "kill": ("process ended", "killed"),
    "memory": ("out of memory", "can't allocate memory"),
}
"""What fails, and one of the words that all ranks must be told."""
TIMEOUT = 12.0  # seconds that a rank may be silent


class Failing(nn.Linear):
    """Fails in one forward."""

    fault = ""

    def forward(self, hidden: Tensor) -> Tensor:
        """As a linear layer."""
        if self.fault == "raise":
            raise ValueError("planted")
        if self.fault == "kill":
            os.kill(os.getpid(), 9)
        if self.fault == "memory":
            torch.empty(2**41, dtype=torch.uint8, device=hidden.device)
        return super().forward(hidden)


class Arm(Callback):
    """Lets the layer fail in the fourth batch, and leaves the time of it."""

    def __init__(self, fault: str, layer: Failing, folder: Path) -> None:
        self.fault, self.layer, self.folder = fault, layer, folder

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Every rank arms its layer; the one that runs it fails."""
        if batch_idx == 3:
            self.layer.fault = self.fault
            (self.folder / "since").write_text(str(time.time()))


def break_off(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run in which the first block of the second stage fails: what this rank ends with, and when."""
    seed_everything(1, verbose=False)
    model = Layers()
    layer = Failing(model.head.in_features, model.head.in_features)
    model.blocks[-1][0] = layer
    case["pipeline"]["step_timeout"] = TIMEOUT
    trainer = trainer_of(case, folder, max_epochs=1)
    trainer.callbacks.append(Arm(case["fault"], layer, folder))
    told = "nothing was raised"
    try:
        trainer.fit(Language(model, "layers"), batches(trainer))
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    seconds = time.time() - float((folder / "since").read_text())
    (folder / f"told{trainer.global_rank}").write_text(f"{seconds:.1f} {told}")
    return {}


def judge(fault: str, folder: Path, ranks: int) -> str:
    """What was wrong with how a run broke off; empty where nothing was."""
    found = [path.read_text() for path in sorted(folder.glob("told*"))]
    if len(found) < ranks - (fault == "kill"):
        return f"only {len(found)} of {ranks} ranks told anything: {found}"
    for text in found:
        seconds, _, told = text.partition(" ")
        if not any(words in told.lower() for words in FAULTS[fault]):
            return f"not told the cause: {told[:300]}"
        if float(seconds) > TIMEOUT + 2:
            return f"told only after {seconds} s"
    return ""


# A model that one device cannot hold


class Grown(LightningModule):
    """A GPT that is built where it is used, by the stage that has it."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers, self.width = layers, width

    def configure_model(self) -> None:
        """Build it."""
        if hasattr(self, "model"):
            return
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=8192, n_positions=256, n_embd=self.width, n_layer=self.layers, n_head=16
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of the next token."""
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW in float32: 16 bytes for a parameter, its gradient and its state."""
        return torch.optim.AdamW(self.parameters(), 1e-4)


def grow(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train it within a limit of a device's memory that it does not fit: the loss, and what ranks took."""
    limit = case["limit_gib"] * 2**30
    torch.set_num_threads(2)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    seed_everything(1, verbose=False)
    tokens = torch.randint(8192, (SAMPLES, 256))
    watch = [BubbleMonitor(1), StageMemoryMonitor(1)] if case["pipeline"] else []
    trainer = Trainer(
        accelerator="cuda", devices=1, num_nodes=case["ranks"], callbacks=watch, max_epochs=2,
        strategy=PipelineStrategy(**case["pipeline"]) if case["pipeline"] else "auto",
        default_root_dir=folder, log_every_n_steps=1,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(Grown(case["layers"], case["width"]), DataLoader(TensorDataset(tokens), batch_size=8))
    taken = torch.cuda.max_memory_allocated() / 2**30
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    names = ("train_loss", "pipeline/bubble_fraction", "pipeline/step_time_s")
    peaks = [f"{found[name]:.2f}" for name in sorted(found) if name.endswith("peak_memory_gib")]
    told = {name: found[name] for name in names if name in found}
    return {**told, "GiB of this rank": taken, "of all": peaks, "seconds": time.perf_counter() - began}
