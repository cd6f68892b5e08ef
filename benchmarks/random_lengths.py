"""Fit random models on batches of random lengths; weights and loss have to be those of one device.

    python benchmarks/random_lengths.py --programs 200

Layers keep a length, halve it, fill it up, cut it, double it or add a token. A seed that fails is printed,
and the exit status is 1.
"""

import collections
import logging
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline.errors import PipelineError

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ranks.lightning_cases import trainer, weights

WIDTH = 6
KINDS = ("token", "halves", "thirds", "keeps", "at most", "filled up", "twice", "attention", "attention")


class Layer(nn.Module):
    """One of `KINDS`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        stride = {"halves": 2, "thirds": 3}.get(kind, 1)
        self.kind, self.own = kind, nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (samples, length, width), of which the length may be another one afterwards."""
        if self.kind in ("halves", "thirds", "keeps"):
            return self.conv(x.mT).mT
        if self.kind == "token":
            x = torch.cat([x[:, :1], x], 1)
        elif self.kind == "at most":
            x = x[:, :14]
        elif self.kind == "filled up":
            x = F.pad(x, (0, 0, 0, -x.shape[1] % 4))
        elif self.kind == "twice":
            x = x.repeat_interleave(2, 1)
        else:
            x = x + (x @ x.mT / x.shape[1]).softmax(-1) @ x
        return self.own(x)


class Drawn(LightningModule):
    """A few of them, and a loss that is divided by what is in the batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        layers = [Layer(draw.choice(KINDS)) for _ in range(draw.randrange(3, 6))]
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 3)).double()
        self.loss = draw.randrange(3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        out: Tensor = self.net(x)
        if self.loss == 0:
            loss = out.square().mean()
        elif self.loss == 1:
            counts = y > 0
            loss = (out.square() * counts[:, None, None]).sum() / counts.sum().clamp(min=1) / out.shape[1]
        else:
            loss = F.cross_entropy(out.flatten(0, 1), y[:, None].expand(out.shape[:2]).flatten())
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Small steps."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Most of their lengths are on a lattice, some beside it."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    step, least = draw.choice([1, 1, 2, 4]), draw.randrange(6, 12)
    made = []
    for number in range(22):
        length = least + (step * draw.randrange(9) if draw.random() < 0.9 else draw.randrange(9))
        samples = 4 if number % 7 == 0 else 6
        x = torch.randn(samples, length, WIDTH, generator=generator, dtype=torch.float64)
        made.append((x, torch.randint(3, (samples,), generator=generator)))
    return made


def fit(pipeline: dict[str, Any] | None, seed: int) -> dict[str, Tensor]:
    """Weights, and the loss of the epoch among them."""
    options = {"max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False}
    module, run = Drawn(seed), trainer(pipeline, **options)
    run.fit(module, DataLoader(batches(seed), batch_size=None))  # type: ignore[arg-type]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return {"loss": run.callback_metrics["loss"], **weights(module)}


def outcome_of(seed: int) -> str:
    """`equal`, `refused` or `wrong`."""
    expected = fit(None, seed)
    count = random.Random(seed).choice([2, 3])
    pipeline = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": count}
    try:
        found = fit(pipeline, seed)
    except PipelineError:
        return "refused"
    same = (torch.allclose(found[k], v, rtol=1e-9, atol=1e-9, equal_nan=True) for k, v in expected.items())
    return "equal" if all(same) else "wrong"


def main(programs: int = 200, first: int = 0) -> None:
    """Run them and print a count of what happened.

    Args:
        programs: How many.
        first: Seed of the first.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    counts, begin = collections.Counter[str](), time.monotonic()
    for seed in range(first, first + programs):
        outcome = outcome_of(seed)
        counts[outcome] += 1
        if outcome == "wrong":
            print("wrong:", seed)
    print(f"{first} to {first + programs - 1} in {time.monotonic() - begin:.0f} s: {dict(counts)}")
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
