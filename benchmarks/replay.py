"""What replaying a step on every stage costs: all stages' forwards summed, against one process's forward.

    python benchmarks/replay.py

A 32-layer Llama from transformers, one thread, no messages. What stands between the layers (masks, rotary
tables) is repeated on every stage; the rest is bookkeeping. Rounds of both sides alternate; medians are
printed.
"""

import copy
import statistics
import time
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pipeline.split import SplitModule, partition, trace_step

Batch = dict[str, Tensor]


class Llama(LightningModule):
    """A causal language model as transformers builds it."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        config = LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, vocab_size=256,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self.model(**batch).loss


class Stages:
    """All stages of a module in one process: a copy of the module for each."""

    def __init__(self, module: LightningModule, batch: Batch, num_stages: int) -> None:
        begin = time.perf_counter()
        trace = trace_step(module, "training_step", (batch, 0), {})
        self.trace_seconds = time.perf_counter() - begin
        cut = partition(trace, num_stages, how="uniform", num_microbatches=1)
        copies = [copy.deepcopy(module) for _ in range(num_stages)]
        self.splits = [SplitModule(one, cut, stages=[index]) for index, one in enumerate(copies)]

    def forward(self, batch: Batch, step: int) -> None:
        """One micro-batch through all stages, the values handed on."""
        values: Any = None
        for index, split in enumerate(self.splits):
            split.begin(
                "training_step", microbatches=[((batch, 0), {})], weights=None, key=(0, step), replica=0
            )
            values = split.stage(index).forward(0, values)
            split.finish()


def measure(
    module: LightningModule, stages: Stages, batch: Batch, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of one process's forward and of all stages' together, round by round."""
    one: list[float] = []
    summed: list[float] = []
    with torch.no_grad():
        for step in range(rounds):
            begin = time.perf_counter()
            module.training_step(batch, 0)
            one.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            stages.forward(batch, step)
            summed.append(time.perf_counter() - begin)
    return one, summed


def main(
    widths: tuple[int, ...] = (32, 256),
    layers: int = 32,
    num_stages: int = 4,
    rounds: int = 30,
    warm_up: int = 5,
) -> None:
    """Measure and print a line per width.

    Args:
        widths: Hidden sizes to measure.
        layers: Decoder layers.
        num_stages: Stages that the model is cut into.
        rounds: Measured forwards of each side.
        warm_up: Forwards before those.
    """
    torch.set_num_threads(1)
    print(f"{layers} layers, {num_stages} stages, torch {torch.__version__}, median of {rounds} rounds")
    for width in widths:
        torch.manual_seed(0)
        module = Llama(layers, width)
        tokens = torch.randint(0, 256, (4, 64))
        batch = {"input_ids": tokens, "labels": tokens}
        stages = Stages(module, batch, num_stages)
        one, summed = measure(module, stages, batch, rounds + warm_up)
        ours, theirs = statistics.median(summed[warm_up:]), statistics.median(one[warm_up:])
        print(
            f"width {width:4d}: traced in {stages.trace_seconds:.2f} s; one process {1e3 * theirs:.2f} ms, "
            f"stages together {1e3 * ours:.2f} ms, ratio {ours / theirs:.2f}"
        )


if __name__ == "__main__":
    auto_cli(main)
