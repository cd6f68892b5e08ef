"""Fine-tune a language model of `transformers` from a local folder, over stages.

    python examples/finetune_transformers.py --folder path/to/model --stages 2

The folder is what `save_pretrained` writes. Without one, a small Llama with random weights is made, so that
the example runs without a download; it reads bytes, so that it needs no tokenizer.
"""

import os
import shutil
from pathlib import Path

import torch
from jsonargparse import auto_cli
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_pipeline import PipelineStrategy


class FineTuned(LightningModule):
    """A causal language model that was loaded from a folder; nothing in it knows of stages."""

    def __init__(self, folder: str, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(folder).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss that `transformers` works out itself."""
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def make_folder(folder: Path) -> None:
    """Save a small Llama with random weights, as `save_pretrained` does."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    made = folder.with_name(f"{folder.name}-{os.getpid()}")  # under torchrun all ranks make it at once
    LlamaForCausalLM(config).save_pretrained(made)
    try:
        made.rename(folder)
    except OSError:  # another rank was first
        shutil.rmtree(made)


def windows(length: int = 64, count: int = 512) -> Tensor:
    """Bytes of this file, again and again, as windows."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return torch.stack([text[(17 * i) % (len(text) - length) :][:length] for i in range(count)])


def main(
    folder: Path = Path("small-llama"), stages: int = 2, steps: int = 100, out: Path = Path("tuned.ckpt")
) -> None:
    """Train, and save a checkpoint.

    Args:
        folder: A model that `save_pretrained` wrote; made where it is missing.
        stages: Pipeline stages, one process each.
        steps: Optimizer steps.
        out: The checkpoint, a folder that each stage writes its part of.
    """
    seed_everything(0, workers=True, verbose=False)
    torch.set_num_threads(1)
    if not folder.exists():
        make_folder(folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=PipelineStrategy(stages=stages),
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(FineTuned(str(folder)), DataLoader(windows(), batch_size=32, shuffle=True))
    trainer.save_checkpoint(out)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.3f} after {steps} steps; wrote {out}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
