"""Chosen steps as they happened: a trace, a picture, and text in the log."""

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.callbacks.detaching import DetachingCallback
from lightning_pipeline.callbacks.publishing import count_problem, refuse
from lightning_pipeline.forecast import name_of
from lightning_pipeline.measure import (
    BatchClock,
    Comparison,
    PipelineRun,
    RankStep,
    gather_step,
    run_of,
    trace,
)
from lightning_pipeline.model.cut import stage_activations
from lightning_pipeline.recording import Mark, Message, Recording
from lightning_pipeline.schedules import Plan
from lightning_pipeline.schedules.drawing import Picture, has_plot, require_plot

_ANY_WIDTH = 10_000  # characters; a page scrolls
_TENTH = 9  # counted from 0: caches are warm then, and a short fit gets there


@dataclass
class _Taken:
    """A recorded step, before its times are read."""

    number: int
    plan: Plan
    recording: Recording
    messages: list[Message]
    marks: list[Mark]
    reduced: Mark | None


class PipelineTimeline(DetachingCallback):
    """Records chosen steps and shows them as they happened, below how they were planned.

    For step 9, say, global rank 0 writes `timeline-9.json`, a trace for https://ui.perfetto.dev or
    chrome://tracing with every action and message of every rank, `timeline-9.svg` (and `.png`), the
    numbered boxes of the papers with waiting by its cause, and the same as text to the log where the
    terminal is wide enough. With a `TensorBoardLogger` the picture is shown there too, as an image if
    matplotlib is installed (`lightning-pipeline[plot]`), else as text.
    A second fit with the same callback and folder writes `timeline-9-v1.json` beside the first one's.

    Steps are training batches, counted from 0 over all epochs; with `accumulate_grad_batches=1` that is
    `trainer.global_step` when the batch begins. Of data-parallel replicas the first is recorded. Under
    `fast_dev_run` files are written only if `dirpath` is given. On a GPU, a recorded step is read
    and written at the end of the next one.

    Attributes:
        files: What this rank has written.
        seconds_recording: Spent on this rank to record steps and to gather them, waiting for the slowest
            rank included.
        seconds_writing: Spent on this rank to draw and write, after the recorded steps.

    Args:
        steps: Which to record. Default, if `every_n_steps` is not given either: the tenth of the fit, or
            its last if it is shorter.
        every_n_steps: Record the last of every so many. Default: only `steps`.
        dirpath: Folder to write to. Default: `trainer.log_dir`, which is `default_root_dir` without a logger.
        png: Write the picture as PNG, too. Needs matplotlib.

    Raises:
        ConfigurationError: `steps` or `every_n_steps` is no such number, or PNG needs matplotlib.
    """

    def __init__(
        self,
        steps: list[int] | None = None,
        every_n_steps: int | None = None,
        dirpath: str | Path | None = None,
        png: bool = False,
    ) -> None:
        refuse(self, [_steps_problem(steps), count_problem("every_n_steps", every_n_steps)])
        if png:
            require_plot()
        self.steps = None if steps is None else frozenset(steps)
        self.every_n_steps, self.dirpath, self.png = every_n_steps, dirpath, png
        self.files: list[Path] = []
        self.seconds_recording = self.seconds_writing = 0.0
        self._folder: Path | None = None
        self._batches = self._default = 0
        self._recording: int | None = None
        self._missing: set[int] = set()
        self._recorded = 0
        self._clock: BatchClock | None = None
        self._taken: _Taken | None = None
        self._unwatch: Callable[[], None] = lambda: None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = run_of(trainer, self)
        if run.replica_index == 0 and not run.clock_offsets:
            run.align_clocks()
        self._batches, self._recording, self._recorded = 0, None, 0
        self.detach()
        self._clock = BatchClock(run, trainer)
        self._default = int(min(_TENTH, max(_batches_left(trainer) - 1, 0)))
        self._missing = set(self.steps or ())
        self._folder = None if self.dirpath is None else Path(self.dirpath)
        if self.dirpath is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # asks rank 0: all ranks must

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        number, run = trainer.fit_loop.total_batch_idx, run_of(trainer, self)
        self._recording = number if self._wants(number) and run.replica_index == 0 else None
        self._missing.discard(number)
        self._batches += 1
        self._watching.ready()
        if self._recording is not None:
            run.record_messages(True)
            self._unwatch = run.timeline.watch()

    def _wants(self, number: int) -> bool:
        if self.steps is None and self.every_n_steps is None:
            return self._batches == self._default
        every = self.every_n_steps is not None and (number + 1) % self.every_n_steps == 0
        return every or (self.steps is not None and number in self.steps)

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._watching.close()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._watching.close()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watching.gradients_done()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watching.pause()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:  # the sanity check comes before training
            self._clock.pause()

    @override
    def detach(self) -> None:
        """Let go of the clock."""
        self._unwatch()
        self._taken = None
        if self._clock is not None:
            self._clock.detach()
            self._clock = None

    @property
    def _watching(self) -> BatchClock:
        assert self._clock is not None, "training has started"
        return self._clock

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        marks = self._watching.end()
        self._finish(trainer)
        if self._recording is None:
            return
        number, self._recording = self._recording, None
        self._recorded += 1
        run, log = run_of(trainer, self), run_of(trainer, self).messages
        assert run.last_plan is not None, "a step that ended had a plan"
        messages = [] if log is None else log.messages
        self.seconds_recording += 0.0 if log is None else log.seconds_inside
        self._taken = _Taken(
            number, run.last_plan, run.timeline.last, messages, marks, self._watching.reduced
        )
        run.record_messages(False)
        self._unwatch()
        if run.timeline.stream is None:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        """Gather and show the step that was recorded; on a device at the end of the step after it."""
        if self._taken is None:
            return
        taken, self._taken, begin = self._taken, None, time.monotonic()
        run = run_of(trainer, self)
        around = self._watching.spans(taken.marks, taken.reduced)
        steps = gather_step(run, taken.recording, around, taken.messages)
        recorded = time.monotonic()
        self.seconds_recording += recorded - begin
        if trainer.is_global_zero:
            comparison = Comparison(taken.plan, steps, taken.number, name_of(run.schedule))
            self._show(trainer, comparison, steps, taken.number)
            self.seconds_writing += time.monotonic() - recorded

    def _show(self, trainer: Trainer, comparison: Comparison, steps: list[RankStep], number: int) -> None:
        held = _activations(run_of(trainer, self), comparison.planned.plan)
        picture, text = comparison.picture(), comparison.text(shutil.get_terminal_size().columns)
        if self._folder is not None:
            written = self._write(self._folder, number, picture, json.dumps(trace(steps, number, held)))
            text += f"\nTimeline of step {number}: {', '.join(map(str, written))}"
        rank_zero_info(text)
        for logger in trainer.loggers:
            if any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__):
                _to_tensorboard(logger, picture, comparison.text(_ANY_WIDTH), number)

    def _write(self, folder: Path, number: int, picture: Picture, events: str) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        contents = {"json": events.encode(), "svg": picture.svg().encode()}
        if self.png:
            contents["png"] = picture.png()
        stem = self._free_name(folder, f"timeline-{number}")
        written = [folder / f"{stem}.{ending}" for ending in contents]
        for path, content in zip(written, contents.values(), strict=True):
            path.write_bytes(content)
        self.files += written
        return written

    def _free_name(self, folder: Path, stem: str) -> str:
        """With `-v1` and so on where an earlier fit with this callback has written that step."""
        names = [stem, *(f"{stem}-v{version}" for version in range(1, len(self.files) + 1))]
        return next(name for name in names if folder / f"{name}.json" not in self.files)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)
        ended = f"it ended after step {trainer.fit_loop.total_batch_idx}"
        if self._missing:
            rank_zero_warn(
                f"PipelineTimeline was to record steps {sorted(self._missing)}, which this fit did not run: "
                f"{ended}"
            )
        elif self._batches and not self._recorded and trainer.is_global_zero:
            rank_zero_warn(
                f"PipelineTimeline recorded nothing: this fit did not come to {self._awaited()}; {ended}. "
                "Choose steps that it runs, such as steps=[2]"
            )

    def _awaited(self) -> str:
        if self.every_n_steps is not None:
            return f"the last of {self.every_n_steps} steps"
        return "any step" if self.steps is not None else f"its batch {self._default + 1}"


def _steps_problem(steps: object) -> str:
    listed = isinstance(steps, list | tuple | range | set | frozenset)
    if steps is None or (listed and all(isinstance(step, int) and step >= 0 for step in steps)):  # type: ignore[attr-defined]
        return ""
    return f"steps={steps!r} must be a list of whole numbers from 0 on: training batches of the whole fit"


def _batches_left(trainer: Trainer) -> float:
    """At most so many batches will be run; perhaps infinite. An optimizer step takes one batch at least."""
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs - trainer.current_epoch
    batches = epochs * trainer.num_training_batches
    steps = math.inf if trainer.max_steps == -1 else trainer.max_steps - trainer.global_step
    return min(batches, steps)


def _activations(run: PipelineRun, plan: Plan) -> dict[int, int]:
    """Bytes that each stage holds for a micro-batch like the first; none on one device."""
    if run.is_one_device:
        return {}
    rank_of = [plan.rank_of(stage) for stage in range(plan.num_stages)]
    return {stage: one.until_backward for stage, one in enumerate(stage_activations(run.partition, rank_of))}


def _to_tensorboard(logger: Any, picture: Picture, text: str, number: int) -> None:
    import numpy  # TensorBoard brings it; else nobody here needs it

    if has_plot():
        pixels = numpy.asarray(picture.pixels())
        logger.experiment.add_image("pipeline/timeline", pixels, number, dataformats="HWC")
    else:
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown's way to keep columns
        logger.experiment.add_text("pipeline/timeline", indented, number)
