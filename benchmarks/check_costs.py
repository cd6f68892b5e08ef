"""What the checks between ranks cost in the demo's training, measured inside.

    torchrun --nproc-per-node 2 benchmarks/check_costs.py
    torchrun --nproc-per-node 2 benchmarks/check_costs.py --on_nonfinite skip

Trains as examples/train_gpt.py does. Every function that is there for checks alone is timed by the CPU
seconds of its thread, the timer's own included: what it waits for in them, it would wait for elsewhere.
"""

import logging
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from jsonargparse import auto_cli
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_pipeline import PipelineStrategy, strategy
from lightning_pipeline.data import Feed
from lightning_pipeline.hooks import AgreedGradients, RemoteUnits
from lightning_pipeline.ranks import Failure, Lookout, Notes
from lightning_pipeline.run.in_step import RanksInStep
from lightning_pipeline.wire import Waits

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, StandardLibrary

WARM_UP = 20
IN_STEP = {
    "waits are written down": [(Waits, "enter"), (Waits, "leave")],
    "a failed run is asked for": [(Failure, "go_on")],
    "batches are compared": [(Feed, "check")],
    "all ranks are asked": [(RanksInStep, "end_batch")],
    "hooks of the user's end together": [(RemoteUnits, "end")],
    "gradients are looked at": [(AgreedGradients, "own"), (AgreedGradients, "found")],
}  # fmt: skip
BESIDE = {"the lookout": [(Lookout, "_beat")], "its questions": [(Notes, "_answer")]}
SETUP = {
    "settings, modules and optimizers are compared": [
        (strategy, "compare_runs"), (strategy, "compare_modules"), (strategy, "compare_optimizers"),
    ],
    "notes and lookout begin": [(Notes, "__init__"), (Lookout, "__init__"), (Lookout, "start")],
}  # fmt: skip


class Spent(dict[str, float]):
    """CPU seconds by what they went to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)

    def watch(self, what: str, owner: Any, name: str) -> None:
        """Time a function from now on; the outermost where one calls another."""
        function: Callable[..., Any] = getattr(owner, name)
        self.setdefault(what, 0.0)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self[what] += time.thread_time() - begin
                self.calls[what] += 1

        setattr(owner, name, timed)

    def reset(self) -> None:
        """Begin anew."""
        self.update(dict.fromkeys(self, 0.0))
        self.calls.clear()


class Steps(Callback):
    """Counts whole steps after the warm-up."""

    def __init__(self, spent: Spent) -> None:
        self.spent, self.begin, self.steps, self.seconds = spent, 0.0, 0, 0.0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """The clock runs from the end of the warm-up."""
        now = time.perf_counter()
        if trainer.global_step == WARM_UP:
            self.begin = now
            self.spent.reset()
        self.steps, self.seconds = trainer.global_step - WARM_UP, now - self.begin


def main(
    steps: int = 171,
    num_microbatches: int = 4,
    on_nonfinite: Literal["ignore", "skip", "raise"] = "ignore",
    step_timeout: float = 300,
    ranks: int = 2,
) -> None:
    """Print what the checks cost on this rank.

    Args:
        steps: Optimizer steps; the first 20 are not measured.
        num_microbatches: Parts of each batch.
        on_nonfinite: Of the strategy.
        step_timeout: Of the strategy; signs of life come more often where it is short.
        ranks: Stages.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(1, verbose=False)
    in_step, setup = Spent(), Spent()
    for table, spent in ((IN_STEP, in_step), (BESIDE, in_step), (SETUP, setup)):
        for what, functions in table.items():
            for owner, name in functions:
                spent.watch(what, owner, name)
    counted = Steps(in_step)
    trainer = Trainer(
        accelerator="cpu", devices=ranks, max_epochs=100, max_steps=steps, callbacks=[counted],
        strategy=PipelineStrategy(
            ranks, num_microbatches=num_microbatches, on_nonfinite=on_nonfinite, step_timeout=step_timeout
        ),
        gradient_clip_val=1.0, log_every_n_steps=10, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(GPT(), StandardLibrary())
    step = counted.seconds / counted.steps
    lines = [
        f"  {what}: {1e3 * seconds / counted.steps:.3f} ms ({in_step.calls[what] / counted.steps:.1f} calls)"
        for what, seconds in in_step.items()
    ]
    lines += [f"  before the first step, {what}: {1e3 * seconds:.1f} ms" for what, seconds in setup.items()]
    total = sum(in_step.values()) / counted.steps
    print(
        f"rank {trainer.global_rank}: {counted.steps} steps of {1e3 * step:.1f} ms, "
        f"checks {1e3 * total:.3f} ms ({total / step:.2%}); "
        f"before the first step {1e3 * sum(setup.values()):.1f} ms\n" + "\n".join(lines),
        flush=True,
    )


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
