"""Train a small GPT on Python's own standard library over stages: `python examples/train_gpt.py --stages 2`.

`--stages 0` trains the same model on one device without the strategy. On CPU every stage is one process.
"""

import shutil
import time
import warnings
from pathlib import Path
from typing import Literal

import torch
from gpt import GPT, StandardLibrary
from jsonargparse import auto_cli
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor, PipelineTimeline, StageMemoryMonitor


class ValidationHistory(Callback):
    """Prints the validation loss as it falls."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One line a validation, on rank 0."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["val_loss"])
            print(f"\nstep {trainer.global_step}: validation loss {loss:.3f} nats per byte", flush=True)


def trained_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All stages' weights out of a saved checkpoint: a directory, or the one file that one device writes."""
    if checkpoint.is_file():
        return torch.load(checkpoint, weights_only=True)["state_dict"]
    gathered = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, gathered)
    return torch.load(gathered, weights_only=True)["model"]


def main(
    stages: int = 2,
    steps: int = 1200,
    num_microbatches: int = 4,
    schedule: str = "1F1B",
    layers: int = 6,
    width: int = 96,
    batch_size: int = 16,
    tied: bool = True,
    accelerator: str = "cpu",
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed"] = "32-true",
    out: Path = Path("demo_out"),
) -> None:
    """Train, validate, save, and write a little Python.

    Args:
        stages: Pipeline stages, one process each. 0 trains on one device without the strategy.
        steps: Optimizer steps.
        num_microbatches: Parts that each batch is cut into.
        schedule: Order of the parts' forwards and backwards.
        layers: Blocks of the GPT.
        width: Size of its hidden state.
        batch_size: Texts per step.
        tied: Whether the head shares the embedding's weight, here the first and the last stage.
        accelerator: Lightning's name of the devices.
        precision: Lightning's name of the precision. In "64-true", stages change no printed digit.
        out: Folder for what is written.
    """
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6.6 with torch 2.13
    seed_everything(1, verbose=False)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model, data = GPT(layers=layers, width=width, tied=tied), StandardLibrary(batch_size=batch_size)
    strategy, callbacks = "auto", [ValidationHistory()]
    if stages:
        strategy = PipelineStrategy(stages, num_microbatches=num_microbatches, schedule=schedule)
        timeline = PipelineTimeline(steps=[steps - 1], dirpath=out)  # the last one
        callbacks += [BubbleMonitor(), StageMemoryMonitor(), timeline]
    trainer = Trainer(
        accelerator=accelerator,
        precision=precision,
        devices=max(stages, 1),
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=100,
        max_steps=steps,
        val_check_interval=max(steps // 4, 1),
        limit_val_batches=16,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=out,
    )
    trainer.validate(model, data, verbose=False)
    if trainer.is_global_zero:
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
    begin = time.monotonic()
    trainer.fit(model, data)
    trainer.save_checkpoint(out / "checkpoint", weights_only=False)
    if trainer.is_global_zero:
        files = ", ".join(sorted(path.name for path in out.iterdir()))
        print(f"{steps} steps in {time.monotonic() - begin:.0f} s; {out} holds {files}")
        whole = GPT(layers=layers, width=width, tied=tied)
        whole.load_state_dict(trained_weights(out / "checkpoint"))
        print("What the trained weights write:\n" + whole.generate("def ", 400))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
