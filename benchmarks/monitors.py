"""What the monitors cost on the demo's GPT, and how well a bubble of known size is measured.

    torchrun --nproc-per-node 2 benchmarks/monitors.py cost
    torchrun --nproc-per-node 4 benchmarks/monitors.py accuracy

`cost` trains as examples/train_gpt.py does and times every hook of the callbacks from inside. `accuracy` lets
stages sleep and compares what `BubbleMonitor` reports with the simulator, given the times really slept.
"""

import logging
import os
import sys
import time
import warnings
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor
from lightning_pipeline.schedules import Costs, get_schedule, simulate

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, StandardLibrary

WARM_UP = 20


class Watched:
    """Adds up the time inside the hooks of a callback, from a step on; that of the table at the end apart."""

    def __init__(self, callback: Callback) -> None:
        self.name, self.on = type(callback).__name__, False
        self.seconds = self.worked = self.at_end = 0.0
        for name in dir(Callback):
            if name.startswith("on_") and getattr(type(callback), name) is not getattr(Callback, name):
                setattr(callback, name, self._timed(getattr(callback, name), at_end=name == "on_train_end"))

    def _timed(self, hook: Any, *, at_end: bool) -> Any:
        @wraps(hook)  # in whose module it is says whose hook it is: the user's are watched by the strategy
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, cpu = time.perf_counter(), time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begin
                if at_end:
                    self.at_end += spent
                elif self.on:
                    self.seconds += spent
                    self.worked += time.thread_time() - cpu

        return timed


class Steps(Callback):
    """Starts the watches after the warm-up; first of the callbacks, so that a step is a whole one."""

    def __init__(self, watches: list[Watched]) -> None:
        self.watches, self.begin, self.steps, self.seconds = watches, 0.0, 0, 0.0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Count whole steps only."""
        now = time.perf_counter()
        if trainer.global_step == WARM_UP:
            self.begin = now
            for watch in self.watches:
                watch.on = True
        self.steps, self.seconds = trainer.global_step - WARM_UP, now - self.begin


def cost(steps: int = 171, num_microbatches: int = 4, schedule: str = "1F1B", clip: float = 1.0) -> None:
    """Share of the demo's step that is spent inside the callbacks.

    Args:
        steps: Optimizer steps; the first 20 are not measured.
        num_microbatches: Parts of each batch.
        schedule: Order of the work.
        clip: Norm to clip gradients to.
    """
    seed_everything(1, verbose=False)
    ranks = int(os.environ["WORLD_SIZE"])
    callbacks = [BubbleMonitor(), StageMemoryMonitor()]
    watches = [Watched(callback) for callback in callbacks]
    counted = Steps(watches)
    trainer = Trainer(
        accelerator="cpu", devices=ranks, max_epochs=100, max_steps=steps, callbacks=[counted, *callbacks],
        strategy=PipelineStrategy(ranks, num_microbatches=num_microbatches, schedule=schedule),
        gradient_clip_val=clip, log_every_n_steps=10, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(GPT(), StandardLibrary())
    step = counted.seconds / counted.steps
    inside = [watch.seconds / counted.steps for watch in watches]
    worked = [watch.worked / counted.steps for watch in watches]
    parts = [
        f"{watch.name} {1e3 * spent:.3f} ms, {spent / step:.2%} (of CPU {1e3 * own:.3f} ms, {own / step:.2%})"
        for watch, spent, own in zip(watches, inside, worked, strict=True)
    ]
    print(
        f"rank {trainer.global_rank}: {counted.steps} steps of {1e3 * step:.2f} ms; in each "
        f"{'; '.join(parts)}; together {sum(inside) / step:.2%} ({sum(worked) / step:.2%}); "
        f"tables at the end {', '.join(f'{1e3 * watch.at_end:.0f} ms' for watch in watches)}",
        flush=True,
    )


class Sleep(torch.autograd.Function):
    """Passes a tensor on after a while, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: "Sleepy") -> Tensor:
        """Sleep unless the step is only traced."""
        ctx.block = block
        if type(x) is Tensor:
            block.sleep("F", block.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sleep."""
        ctx.block.sleep("B", ctx.block.backward_seconds)
        return gradient, None


class Sleepy(nn.Module):
    """A layer that sleeps, and notes how long it really did."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.layer = nn.Linear(4, 4)
        self.slept: dict[str, list[float]] = {"F": [], "B": []}

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return Sleep.apply(self.layer(x), self)

    def sleep(self, kind: str, seconds: float) -> None:
        """Write down how long it took."""
        begin = time.perf_counter()
        time.sleep(seconds)
        self.slept[kind].append(time.perf_counter() - begin)


class SleepyNet(LightningModule):
    """One layer a stage."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Sleepy(each, each) for each in seconds))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A loss that has gradients."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reads(Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """After the monitor."""
        self.steps.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def accuracy(
    seconds: float = 0.1, num_microbatches: int = 8, steps: int = 6, uneven: float = 1.5,
    schedules: list[str] | None = None,
) -> None:  # fmt: skip
    """What is reported against the simulator with the times really slept and free messages.

    Args:
        seconds: That a rank's stages sleep in a forward, and in a backward.
        num_microbatches: Parts of each batch.
        steps: Of training; medians over all but the first two.
        uneven: What stage 1 takes in the second of two runs, as a multiple.
        schedules: Default: GPipe, 1F1B, Interleaved1F1B.
    """
    for schedule in schedules or ["GPipe", "1F1B", "Interleaved1F1B"]:
        for factor in (1.0, uneven):
            _accuracy(schedule, seconds, num_microbatches, steps, factor)


def _accuracy(schedule: str, seconds: float, num_microbatches: int, steps: int, factor: float) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    plan = get_schedule(schedule).plan(ranks, num_microbatches)
    each = [seconds * ranks / plan.num_stages] * plan.num_stages
    each[1] *= factor
    module, reads = SleepyNet(each), Reads()
    trainer = Trainer(
        accelerator="cpu", devices=ranks, max_steps=steps, callbacks=[BubbleMonitor(every_n_steps=1), reads],
        strategy=PipelineStrategy(
            ranks, num_microbatches=num_microbatches, schedule=schedule,
            partition=[f"net.{stage}" for stage in range(1, plan.num_stages)],
        ),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    collected: list[Any] = []
    module.on_train_end = lambda: collected.extend(trainer.strategy.gather_from_pipeline(_slept(module)))
    trainer.fit(module, DataLoader(torch.ones(num_microbatches * steps, 4), batch_size=num_microbatches))
    if not trainer.is_global_zero:
        return
    slept = {stage: times for own in collected for stage, times in own.items()}
    forward, backward = zip(*(slept[stage] for stage in range(plan.num_stages)), strict=True)
    half = [time / 2 for time in backward]
    truth = simulate(plan, Costs(forward, half, half))
    seen = {key: median(step[key] for step in reads.steps[2:]) for key in reads.steps[-1]}
    idle = [value for key, value in seen.items() if key.endswith("/idle_s")]
    worked = [value for key, value in seen.items() if key.endswith("/forward_s")]
    expected = [
        num_microbatches * sum(forward[s] for s in plan.stages_of(rank)) for rank in range(plan.num_ranks)
    ]
    print(
        f"{schedule:16s} stage 1 x {factor:.1f}: bubble {seen['pipeline/bubble_fraction']:.4f}, true "
        f"{truth.bubble:.4f} ({seen['pipeline/bubble_fraction'] / truth.bubble - 1:+.1%}; without messages "
        f"{seen['pipeline/bubble_fraction_simulated'] / truth.bubble - 1:+.1%}); worst idle "
        f"{_worst(idle, [truth.makespan - busy for busy in truth.busy]):+.1%}, worst forward "
        f"{_worst(worked, expected):+.1%}",
        flush=True,
    )


def _slept(module: SleepyNet) -> dict[int, tuple[float, float]]:
    return {
        stage: (median(block.slept["F"]), median(block.slept["B"]))
        for stage, block in enumerate(module.net)
        if block.slept["B"]
    }


def _worst(found: list[float], expected: list[float]) -> float:
    return max((f / e - 1 for f, e in zip(found, expected, strict=True)), key=abs)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    auto_cli([cost, accuracy])
