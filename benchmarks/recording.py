"""What it costs to record a step: `python benchmarks/recording.py`, with `--stages 2` or more.

The demo's GPT trains with `PipelineTimeline(every_n_steps=2)`: every other step is recorded. Printed are
medians over the steps. Recording is that of the rank which took least in each step: it came last to where
the others waited for it, as they would have in the next step. Writing is rank 0's alone.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import PipelineTimeline

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, StandardLibrary


class Watch(Callback):
    """Times every batch around the callback between `start` and `end`, and what it says it took.

    Attributes:
        rows: Per batch whether it was recorded, seconds of the batch, in recording, and in writing.
    """

    def __init__(self, timeline: PipelineTimeline) -> None:
        self.timeline = timeline
        self.rows: list[tuple[bool, float, float, float]] = []
        self.began = self.recording = self.writing = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Before the step."""
        self.began = time.perf_counter()
        self.recording, self.writing = self.timeline.seconds_recording, self.timeline.seconds_writing

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """After the step, and after the recording of it, for callbacks run in order."""
        recording = self.timeline.seconds_recording - self.recording
        writing = self.timeline.seconds_writing - self.writing
        self.rows.append((recording > 0, time.perf_counter() - self.began, recording, writing))


def main(stages: int = 2, steps: int = 120, num_microbatches: int = 4, schedule: str = "1F1B") -> None:
    """Train, and print the medians.

    Args:
        stages: Pipeline stages, one process each.
        steps: Of the run; the first 10 are left out.
        num_microbatches: Parts of a batch.
        schedule: Order of the parts' forwards and backwards.
    """
    torch.set_num_threads(1)
    timeline = PipelineTimeline(every_n_steps=2, dirpath=Path(tempfile.gettempdir()) / "recording")
    watch = Watch(timeline)
    trainer = Trainer(
        accelerator="cpu", devices=stages, max_steps=steps, callbacks=[timeline, watch], logger=False,
        strategy=PipelineStrategy(stages, num_microbatches=num_microbatches, schedule=schedule),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )  # fmt: skip
    every: list[list[tuple[bool, float, float, float]]] = []

    def gather(*_: Any) -> None:
        every.extend(trainer.strategy.gather_from_pipeline(watch.rows[10:]))

    watch.on_train_end = gather  # type: ignore[method-assign]  # the ranks are still connected then
    trainer.fit(GPT(layers=6, width=96), StandardLibrary(batch_size=16))
    if trainer.is_global_zero:
        _report(every)


def _report(every: list[list[tuple[bool, float, float, float]]]) -> None:
    steps = list(zip(*every, strict=True))
    plain = statistics.median(max(row[1] for row in step) for step in steps if not step[0][0])
    recorded = [step for step in steps if step[0][0]]
    whole = statistics.median(max(row[1] for row in step) for step in recorded)
    recording = statistics.median(min(row[2] for row in step) for step in recorded)
    writing = statistics.median(max(row[3] for row in step) for step in recorded)
    print(f"a step {1e3 * plain:.2f} ms, recorded {1e3 * whole:.2f} ms, of which inside the callback:")
    print(f"recording {1e3 * recording:.2f} ms, {100 * recording / plain:.2f} % of a step")
    print(f"writing {1e3 * writing:.2f} ms, {100 * writing / plain:.2f} % of a step")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
