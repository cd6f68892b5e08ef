"""What `plan(..., measure=True)` predicts of the demo GPT against what BubbleMonitor measures in a fit.

    torchrun --nproc-per-node 2 benchmarks/plan_accuracy.py

Sizes of examples/train_gpt.py. Rank 0 predicts while the others wait; then each schedule is fitted for
some steps. Makespan and bubble are medians over the steps after the first ten; the whole step, with data,
optimizer and hooks, stands at the end of the line. Memory is that of each rank's parameters, and of the
activations that StageMemoryMonitor counts.
"""

import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, StandardLibrary

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor
from lightning_pipeline.forecast.predict import Prediction

WARM_UP = 10
SIZES = {"layers": 6, "width": 96}


class Readings(Callback):
    """Keeps what the monitors log, step by step."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Called after those of the monitors."""
        if trainer.global_step > WARM_UP:
            for name, value in trainer.callback_metrics.items():
                self.seen.setdefault(name, []).append(float(value))


def strategy(schedule: str) -> PipelineStrategy:
    """Two ranks, four micro-batches, as the demo has them."""
    return PipelineStrategy(int(os.environ["WORLD_SIZE"]), num_microbatches=4, schedule=schedule)


def predicted(schedule: str) -> Prediction:
    """What a plan says before anything is started."""
    seed_everything(1, verbose=False)
    data = StandardLibrary()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    return strategy(schedule).plan(GPT(**SIZES), batch, measure=True).chosen


def measured(schedule: str, steps: int) -> tuple[dict[str, float], list[float]]:
    """Medians of what the monitors log in a fit, and the bytes of each rank's parameters."""
    seed_everything(1, verbose=False)
    readings = Readings()
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy(schedule),
        callbacks=[BubbleMonitor(every_n_steps=1), StageMemoryMonitor(every_n_steps=10), readings],
        max_steps=steps, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    sizes: list[float] = []
    trainer.callbacks.append(_Sizes(sizes))
    trainer.fit(GPT(**SIZES), StandardLibrary())
    return {name: statistics.median(values) for name, values in readings.seen.items()}, sizes


class _Sizes(Callback):
    def __init__(self, sizes: list[float]) -> None:
        self._sizes = sizes

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = sum(p.numel() * p.element_size() for p in trainer.strategy.own_parameters())
        self._sizes.extend(trainer.strategy.gather_from_pipeline(own))


def main(
    schedules: tuple[str, ...] = ("GPipe", "1F1B", "ZBH1", "Interleaved1F1B"),
    steps: int = 60,
    rounds: int = 1,
) -> None:
    """Predict, fit, compare.

    Args:
        schedules: Names.
        steps: Of each fit.
        rounds: How often.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    if first:
        print(
            f"{'':16} {'schedule':>8} {'fit':>8} {'off':>7} {'bubble':>7} {'fit':>7} {'off':>7}  parameters"
        )
    off: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in schedules}
    for _ in range(rounds):
        for schedule in schedules:
            guess = predicted(schedule) if first else None
            found, sizes = measured(schedule, steps)
            if guess is not None:
                off[schedule].append(_report(schedule, guess, found, sizes))
    for schedule, pairs in off.items() if first else ():
        step, bubble = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{schedule:16} median of {rounds}: schedule {step:+.1%}, bubble {bubble:+.1%}")


def _report(
    schedule: str, guess: Prediction, found: dict[str, float], sizes: list[float]
) -> tuple[float, float]:
    """Print a line; how far off time and bubble are."""
    step, bubble = found["pipeline/makespan_s"], found["pipeline/bubble_fraction"]
    parameters = [rank.parameters / size - 1 for rank, size in zip(guess.memory, sizes, strict=True)]
    print(
        f"{schedule:16} {1e3 * guess.step:5.1f} ms {1e3 * step:5.1f} ms {guess.step / step - 1:+7.1%} "
        f"{guess.bubble:7.1%} {bubble:7.1%} {guess.bubble / bubble - 1:+7.1%}  "
        + " ".join(f"{off:+.2%}" for off in parameters)
        + f"  whole step {1e3 * found['pipeline/step_time_s']:.1f} ms"
    )
    for rank, held in enumerate(guess.memory):
        stages = "_".join(map(str, guess.plan.stages_of(rank)))
        name = f"pipeline/stage{'s' * ('_' in stages)}_{stages}/activations_gib"
        if name in found:
            print(
                f"    {name} {found[name]:.6f}, predicted {held.activations / 2**30:.6f}, "
                f"{held.activations / 2**30 / found[name] - 1:+.2%}"
            )
    return guess.step / step - 1, guess.bubble / bubble - 1


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
