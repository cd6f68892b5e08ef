"""A model whose stages sleep known times and write down how long they really slept."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor
from lightning_pipeline.schedules import Costs, Plan, Simulation, simulate
from lightning_pipeline.split.deferred import WeightQueue
from tests.ranks.lightning_cases import FEATURES, loader, trainer

Slept = dict[tuple[int, str], list[float]]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: "Sleepy") -> Tensor:
        ctx.block = block
        if not isinstance(x, FakeTensor):
            block.sleep("F", block.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.block.sleep("I", ctx.block.backward_seconds)
        return gradient, None


class Sleepy(nn.Module):
    """A linear layer that takes its time. One is a stage."""

    slept: Slept

    def __init__(self, stage: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.stage, self.forward_seconds, self.backward_seconds = stage, forward_seconds, backward_seconds
        self.layer = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.layer(x), self)

    def sleep(self, kind: str, seconds: float) -> None:
        begin = time.monotonic()
        time.sleep(seconds)
        self.slept[self.stage, kind].append(time.monotonic() - begin)


class SleepyNet(pl.LightningModule):
    """One block a stage."""

    def __init__(self, seconds: list[tuple[float, float]]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(Sleepy(stage, *times) for stage, times in enumerate(seconds)))
        self.slept: Slept = defaultdict(list)
        for block in self.net:
            block.slept = self.slept

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@contextmanager
def slow_weights(slept: Slept, seconds: float) -> Iterator[None]:
    """Weight-gradient halves that sleep, too."""
    original = WeightQueue.drain

    def drain(queue: WeightQueue) -> None:
        begin = time.monotonic()
        time.sleep(seconds)
        slept[-1, "W"].append(time.monotonic() - begin)
        original(queue)

    WeightQueue.drain = drain  # type: ignore[method-assign]
    try:
        yield
    finally:
        WeightQueue.drain = original  # type: ignore[method-assign]


class Reads(pl.Callback):
    """Keeps what is logged after every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, run: pl.Trainer, *_: Any) -> None:
        logged = {**run.callback_metrics, **run.logged_metrics}
        self.seen.append({key[9:]: float(v) for key, v in logged.items() if key.startswith("pipeline/")})

    def medians(self, skip: int = 2) -> dict[str, float]:
        """By key without `pipeline/`; the first steps left out, which pay for caches."""
        seen = self.seen[skip:]
        return {key: median(step[key] for step in seen) for key in seen[-1]}


class Early(BubbleMonitor):
    """Logs before the callbacks that read."""


def run_asleep(
    stages: int,
    schedule: str,
    seconds: list[tuple[float, float]],
    *,
    steps: int = 6,
    options: Any = None,
    **more: Any,
) -> tuple[dict[str, float], Plan, dict[tuple[int, str], float]]:
    """What a monitor reports, the plan, and the seconds that one action of each stage really slept here."""
    module, reads = SleepyNet(seconds), Reads()
    strategy = PipelineStrategy(
        stages, schedule=schedule, num_microbatches=4, partition=[f"net.{s}" for s in range(1, len(seconds))],
        **(options or {}),
    )  # fmt: skip
    run = trainer(None, max_epochs=1, callbacks=[BubbleMonitor(every_n_steps=1), reads], **more)
    del run
    devices = stages * (options or {}).get("data_parallel_size", 1)
    run = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        callbacks=[BubbleMonitor(every_n_steps=1), reads], **more,
    )  # fmt: skip
    plans = []
    module.on_train_batch_end = lambda *_: plans.append(run.strategy.last_plan)  # type: ignore
    with slow_weights(module.slept, seconds[0][1]):
        run.fit(module, loader(samples=8 * steps))
    return reads.medians(), plans[-1], {key: median(times) for key, times in module.slept.items()}


def truth(plan: Plan, per_rank: list[dict[tuple[int, str], float]]) -> Simulation:
    """What the plan takes with the times really slept."""
    costs: list[list[float]] = [[], [], []]
    for stage in range(plan.num_stages):
        slept = per_rank[stage]
        weight = slept.get((-1, "W"))
        both = slept[stage, "I"]
        costs[0].append(slept[stage, "F"])
        costs[1].append(both if weight is not None else both / 2)
        costs[2].append(weight if weight is not None else both / 2)
    return simulate(plan, Costs(*costs))
