"""A model whose stages sleep known times, and a second stopwatch beside the one that is tested."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor, bubble, memory
from lightning_pipeline.model.replay.stage import StageProgram
from lightning_pipeline.model.replay.weight_gradients import WeightQueue
from tests.naps import Nap
from tests.ranks.lightning_cases import FEATURES, loader

Seconds = list[tuple[float, float]]


class Sleepy(nn.Module):
    """A linear layer that takes its time. One is a stage."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.layer = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(self.layer(x), self.forward_seconds, self.backward_seconds)


class SleepyNet(pl.LightningModule):
    """One block a stage."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(Sleepy(*times) for times in seconds))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sleepy_trainer(stages: int, blocks: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """One block a stage. Options are the Trainer's, `pipeline` those of the strategy."""
    pipeline = {"num_microbatches": 4, **options.pop("pipeline", {})}
    cuts = [f"net.{block}" for block in range(1, blocks)]
    return pl.Trainer(**{
        "accelerator": "cpu", "devices": stages * pipeline.get("data_parallel_size", 1), "logger": False,
        "strategy": PipelineStrategy(stages, partition=cuts, **pipeline), "max_epochs": 1,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "log_every_n_steps": 1, "callbacks": list(callbacks), **options,
    })  # fmt: skip


@contextmanager
def slow_weights(seconds: float) -> Iterator[None]:
    """Weight-gradient halves that sleep, too."""
    original = WeightQueue.drain

    def drain(queue: WeightQueue) -> None:
        time.sleep(seconds)
        original(queue)

    WeightQueue.drain = drain  # type: ignore[method-assign]
    try:
        yield
    finally:
        WeightQueue.drain = original  # type: ignore[method-assign]


class Did(NamedTuple):
    """What a stopwatch around the methods of the stages saw."""

    stage: int
    kind: str
    begin: float
    end: float


METHODS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


@contextmanager
def stopwatch(seen: list[Did]) -> Iterator[None]:
    """Write down every call of a stage; a B that calls I and W counts once."""
    originals = {name: getattr(StageProgram, name) for name in METHODS}
    inside: list[int] = []

    def watched(name: str) -> Any:
        def call(program: StageProgram, *args: Any) -> Any:
            if inside:
                return originals[name](program, *args)
            inside.append(1)
            begin = time.monotonic()
            try:
                return originals[name](program, *args)
            finally:
                seen.append(Did(program.index, METHODS[name], begin, time.monotonic()))
                inside.pop()

        return call

    for name in METHODS:
        setattr(StageProgram, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(StageProgram, name, original)


class Reads(pl.Callback):
    """Keeps what is logged after every step, and what a stopwatch saw in it."""

    def __init__(self, seen: list[Did] | None = None) -> None:
        self.seen = seen if seen is not None else []
        self.steps: list[dict[str, float]] = []
        self.did: list[list[Did]] = []

    def on_train_batch_end(self, run: pl.Trainer, *_: Any) -> None:
        logged = {key: float(value) for key, value in run.callback_metrics.items()}
        self.steps.append({key[9:]: value for key, value in logged.items() if key.startswith("pipeline/")})
        self.did.append(list(self.seen))
        self.seen.clear()

    def medians(self, skip: int = 2) -> dict[str, float]:
        """By key; without the first steps, which pay for caches."""
        steps = self.steps[skip:]
        return {key: median(step[key] for step in steps) for key in steps[-1]}


class Ends(BubbleMonitor):
    """Looks at the clock at every batch's end, when the monitor does: between two callbacks ranks may meet."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=1)
        self.seen: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(time.monotonic())
        super().on_train_batch_end(*args)


def run_asleep(stages: int, schedule: str, seconds: Seconds, steps: int = 5) -> tuple[Any, Any, Any]:
    """Per step what a monitor reports, what a stopwatch saw on this rank, and when it was over."""
    seen: list[Did] = []
    module, ends, reads = SleepyNet(seconds), Ends(), Reads(seen)
    run = sleepy_trainer(stages, len(seconds), ends, reads, pipeline={"schedule": schedule})
    with slow_weights(seconds[0][1]), stopwatch(seen):
        run.fit(module, loader(samples=8 * steps))
    return reads.steps, reads.did, ends.seen


def told() -> list[str]:
    """What the monitors say on this rank from now on."""
    texts: list[str] = []
    bubble.rank_zero_info = memory.rank_zero_info = rank_zero_only(texts.append)  # type: ignore[assignment]
    return texts
