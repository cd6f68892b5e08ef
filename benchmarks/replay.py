"""What replaying a step on every stage costs: all stages' forwards summed, against one process's forward.

    python benchmarks/replay.py

A 32-layer Llama from transformers, one thread, no messages. What stands between the layers (masks, rotary
tables) is repeated on every stage; the rest is bookkeeping. Rounds of both sides alternate; medians of
CPU seconds are printed.
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

from lightning_pipeline.model.cut.partitioning import partition
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.model.trace import trace_step
from lightning_pipeline.model.trace.units import find_units
from lightning_pipeline.wire.stage import Values

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
    """All stages of a module in one process, each with a copy of the module."""

    def __init__(self, module: LightningModule, batch: Batch, num_stages: int) -> None:
        self.trace_seconds: list[float] = []
        self.splits = [
            self._split(copy.deepcopy(module), batch, num_stages, stage) for stage in range(num_stages)
        ]

    def _split(self, module: LightningModule, batch: Batch, num_stages: int, stage: int) -> SplitModel:
        begin = time.perf_counter()
        trace = trace_step(
            module, "training_step", (batch, 0), {}, units=find_units(module, at_least=num_stages)
        )
        self.trace_seconds.append(time.perf_counter() - begin)
        return SplitModel(module, partition(trace, num_stages, how="uniform"), [stage])

    def forward(self, batches: list[Batch], step: int) -> None:
        """Micro-batches through all stages, the values handed on, as in one training step."""
        microbatches = [((batch, 0), {}) for batch in batches]
        weights = [1 / len(batches)] * len(batches)
        for split in self.splits:
            split.begin("training_step", microbatches, weights=weights, key=(0, step))
        for microbatch in range(len(batches)):
            values: Any = None
            for index, split in enumerate(self.splits):
                values = received(split.programs[index].forward(microbatch, values))
        for split in reversed(self.splits):  # each puts back what it found, such as the standard output
            split.failed()  # there is no backward


def received(values: Values | None) -> Values | None:
    """What the next stage gets: the same numbers, not part of the sender's graph."""
    if values is None:
        return None
    tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in values.tensors]
    return Values(tensors, values.table, values.empty)


def measure(
    module: LightningModule, stages: Stages, batches: list[Batch], rounds: int
) -> list[tuple[float, float]]:
    """CPU seconds per micro-batch of one process's forwards and of all stages' together, round by round."""
    seconds = []
    for step in range(rounds):
        begin = time.process_time()
        losses = [module.training_step(batch, 0) for batch in batches]
        del losses  # both sides let go of their graphs, without a backward
        middle = time.process_time()
        stages.forward(batches, step)
        seconds.append(((middle - begin) / len(batches), (time.process_time() - middle) / len(batches)))
    return seconds


def main(
    widths: tuple[int, ...] = (32, 256),
    layers: int = 32,
    num_stages: int = 4,
    num_microbatches: int = 4,
    rounds: int = 20,
    warm_up: int = 3,
) -> None:
    """Measure and print a line per width.

    Args:
        widths: Hidden sizes to measure.
        layers: Decoder layers.
        num_stages: Stages that the model is cut into.
        num_microbatches: Forwards per round, each of 4 texts of 64 tokens.
        rounds: Measured rounds of each side.
        warm_up: Rounds before those.
    """
    torch.set_num_threads(1)
    print(f"{layers} layers, {num_stages} stages, torch {torch.__version__}, median of {rounds} rounds")
    for width in widths:
        torch.manual_seed(0)
        module = Llama(layers, width)
        batches = [
            {"input_ids": tokens, "labels": tokens}
            for tokens in torch.randint(256, (num_microbatches, 4, 64))
        ]
        stages = Stages(module, batches[0], num_stages)
        seconds = measure(module, stages, batches, rounds + warm_up)[warm_up:]
        one, summed = (1e3 * statistics.median(column) for column in zip(*seconds, strict=True))
        print(f"width {width}: one process {one:.2f} ms, stages together {summed:.2f} ms, ", end="")
        print(f"ratio {summed / one:.3f}; traced in {max(stages.trace_seconds):.2f} s", flush=True)


if __name__ == "__main__":
    auto_cli(main)
