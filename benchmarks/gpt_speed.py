"""Tokens per second and CPU seconds per step of a small GPT: our strategy, torch's 1F1B, a loop by hand.

    torchrun --nproc-per-node 2 benchmarks/gpt_speed.py

PipelineStrategy is measured with its Trainer and the unmodified LightningModule. All three train the same
model in the same processes, in turns, in another order each round; medians over the rounds are printed.
"""

import logging
import statistics
import warnings
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from lightning.pytorch import Callback, Trainer
from loops import GPT, HandLoop, Stopwatch, TorchLoop, measure_loop
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy


class Timed(Callback):
    """Measures the steps of a fit after the first `warm_up`."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.watch = warm_up, Stopwatch()
        self.seconds = (0.0, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start when the warm-up is over."""
        if batch_idx == self.warm_up:
            self.watch.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop after the last step."""
        if batch_idx == trainer.max_steps - 1:
            self.seconds = self.watch.stop()


def measure_trainer(model: GPT, batches: Tensor, num_microbatches: int, warm_up: int) -> tuple[float, float]:
    """Wall and CPU seconds of the steps after `warm_up`, Trainer included, 1F1B with automatic cuts."""
    timed = Timed(warm_up)
    size = dist.get_world_size()
    trainer = Trainer(
        accelerator="cpu", devices=size, max_steps=len(batches), callbacks=[timed], logger=False,
        strategy=PipelineStrategy(size, num_microbatches=num_microbatches), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(batches.flatten(0, 1), batch_size=batches.shape[1]))
    return timed.seconds


def over_ranks(seconds: tuple[float, float]) -> tuple[float, float]:
    """The slowest rank's wall seconds and the sum of all ranks' CPU seconds."""
    wall, cpu = torch.tensor(seconds[0]), torch.tensor(seconds[1])
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return float(wall), float(cpu)


SIDES = {
    "PipelineStrategy": measure_trainer,
    "torch": lambda *args: measure_loop(TorchLoop, *args),
    "by hand": lambda *args: measure_loop(HandLoop, *args),
}


def measure(
    rounds: int,
    steps: int,
    warm_up: int,
    layers: int,
    width: int,
    shape: tuple[int, int],
    num_microbatches: int,
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of every side in every round."""
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    for index in range(rounds):
        names = list(SIDES)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            torch.manual_seed(index)
            model = GPT(layers=layers, width=width, block_size=shape[1], tied=False, learning_rate=1e-4)
            batches = torch.randint(0, 256, (warm_up + steps, shape[0], shape[1] + 1))
            results[name].append(over_ranks(SIDES[name](model, batches, num_microbatches, warm_up)))
    return results


def main(
    rounds: int = 5,
    steps: int = 4,
    warm_up: int = 2,
    layers: int = 8,
    width: int = 256,
    batch_size: int = 16,
    block_size: int = 128,
    num_microbatches: int = 8,
) -> None:
    """Measure and print a table.

    Args:
        rounds: How often each side has its turn.
        steps: Measured optimizer steps per turn.
        warm_up: Steps before those.
        layers: Blocks of the GPT.
        width: Size of its hidden state.
        batch_size: Texts per step.
        block_size: Bytes per text.
        num_microbatches: Parts of each batch.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    shape = (batch_size, block_size)
    results = measure(rounds, steps, warm_up, layers, width, shape, num_microbatches)
    if dist.get_rank() == 0:
        print(f"{layers} layers, width {width}, batch {batch_size} x {block_size} bytes, ", end="")
        print(
            f"{num_microbatches} micro-batches, {dist.get_world_size()} ranks, torch {torch.__version__}, ",
            end="",
        )
        print(f"median of {rounds} rounds of {steps} steps")
        for name, seconds in results.items():
            walls, cpus = (statistics.median(column) / steps for column in zip(*seconds, strict=True))
            print(f"{name:18s} {batch_size * block_size / walls:8.0f} tokens/s {cpus:7.3f} CPU s per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    auto_cli(main)
