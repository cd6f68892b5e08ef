"""What splitting the backward into I and W costs: CPU time on one thread against a fused backward.

    python benchmarks/split_backward.py

A `nn.TransformerEncoderLayer`; rounds of both alternate; medians are printed.
"""

import statistics
import time

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from lightning_pipeline.model.replay.weight_gradients import Deferral, WeightQueue


def fused(layer: nn.Module, x: Tensor) -> float:
    """CPU seconds of a fused backward."""
    y = layer(x.clone().requires_grad_())
    begin = time.process_time()
    y.backward(torch.ones_like(y))
    return time.process_time() - begin


def split(layer: nn.Module, x: Tensor, deferral: Deferral) -> float:
    """CPU seconds of I and W together."""
    queue = WeightQueue()
    with deferral.into(queue):
        y = layer(x.clone().requires_grad_())
        begin = time.process_time()
        with queue.collecting():
            y.backward(torch.ones_like(y))
    queue.drain()
    return time.process_time() - begin


def main(
    sizes: tuple[tuple[int, int, int], ...] = ((128, 32, 2), (256, 64, 4), (512, 64, 4)), rounds: int = 60
) -> None:
    """Measure and print a line per size.

    Args:
        sizes: Width, tokens and texts.
        rounds: Of each side; the first five do not count.
    """
    torch.set_num_threads(1)
    deferral = Deferral()
    for width, tokens, texts in sizes:
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        x = torch.randn(texts, tokens, width)
        pairs = [(fused(layer, x), split(layer, x, deferral)) for _ in range(rounds)][5:]
        one, two = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        print(f"width {width}: fused {one:.2f} ms, split {two:.2f} ms, ratio {two / one:.3f}")


if __name__ == "__main__":
    auto_cli(main)
