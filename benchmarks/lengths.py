"""CPU seconds of a step where each batch has another length, against batches of one length and one device.

    python benchmarks/lengths.py

A GPT-2 with its own loss is trained on one rank with two stages, and without a pipeline; the median of the
batches after the first `warm_up`, in each of several rounds.
"""

import logging
import statistics
import time
import warnings
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_pipeline import PipelineStrategy


class Language(LightningModule):
    """A GPT-2 of some layers, with the loss of Hugging Face."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        names = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=512, n_positions=256, n_embd=64, n_layer=layers, n_head=2, **names)
        self.net = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        """Plain steps."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches(Callback):
    """CPU seconds of each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Start."""
        self._begun = time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        """Stop."""
        self.seconds.append(time.process_time() - self._begun)


def measure(pipeline: dict[str, Any] | None, lengths: list[int], layers: int, warm_up: int) -> float:
    """Milliseconds of the median batch."""
    batches = Batches()
    strategy: Any = "auto" if pipeline is None else PipelineStrategy(**pipeline)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[batches], strategy=strategy,
    )  # fmt: skip
    data = [torch.randint(512, (8, length)) for length in lengths]
    trainer.fit(Language(layers), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 1e3 * statistics.median(batches.seconds[warm_up:])


def main(rounds: int = 3, batches: int = 40, layers: int = 6, warm_up: int = 12) -> None:
    """Print the medians over the rounds.

    Args:
        rounds: All four are measured in each.
        batches: In each run.
        layers: Of the model.
        warm_up: Batches that are not counted; the first lengths are traced.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    pipeline = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 4}
    kinds = {"one length": [112] * batches, "another each": [64 + 37 * n % 97 for n in range(batches)]}
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for name, lengths in kinds.items():
            for given in (None, pipeline):
                run = measure(given, lengths, layers, warm_up)
                found.setdefault((name, given is None), []).append(run)
    for name in kinds:
        alone, ours = (statistics.median(found[name, is_alone]) for is_alone in (True, False))
        print(f"{name}: one device {alone:.0f} ms, two stages {ours:.0f} ms of CPU, ratio {ours / alone:.2f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
