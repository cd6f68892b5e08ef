"""Collects the steps of a rank, and every so often compares them over all ranks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_pipeline.forecast import tokens_of
from lightning_pipeline.measure.batches import BatchClock
from lightning_pipeline.measure.exchange import Gathered
from lightning_pipeline.measure.measurement import Measurement, mean_of
from lightning_pipeline.measure.pipeline_run import PipelineRun
from lightning_pipeline.measure.shares import FIELDS, KINDS, row, share_out
from lightning_pipeline.recording import Event, Mark, Recording
from lightning_pipeline.schedules import Plan

_REALIGN = 4  # exchanges with each rank, where ranks' clocks differ
_MOST_UNREAD = 50  # steps kept as they were recorded


class _Step(NamedTuple):
    """What a step left behind, to be read when the device has done it."""

    marks: list[Mark]
    recording: Recording
    plan: Plan
    samples: int
    tokens: int
    sent: int


class Window(NamedTuple):
    """Some steps of this rank.

    Attributes:
        numbers: To be gathered from all ranks; as many on each.
        compared: What they amount to, those of all ranks together, by replica and rank. In order of windows.
    """

    numbers: list[float]
    compared: Callable[[Gathered], Measurement]


class Meter:
    """Measures steps on this rank; all ranks make one together and `collect` together.

    Args:
        run: The strategy.
        trainer: In its training.
    """

    def __init__(self, run: PipelineRun, trainer: Trainer) -> None:
        self.batches = BatchClock(run, trainer)
        self._run = run
        if not run.clock_offsets:
            run.align_clocks()
        run.timeline.anchor()
        self._unwatch = run.timeline.watch()
        self.last: Recording | None = None
        """Of the last training step."""
        self.batch_size = 0
        """Samples of the largest batch of a replica; 0 where batches do not tell."""
        self._lag = 0 if run.timeline.stream is None else 1
        self._unread: list[_Step] = []
        self._window_ends: list[float] = []
        self._sent_before = 0
        self._by_size: dict[float, list[float]] = defaultdict(list)  # time of a micro-batch, by its samples
        self._forget()

    def _forget(self) -> None:
        self._rows: list[list[float]] = []
        self._durations: dict[tuple[int, str], list[int]] = defaultdict(list)
        self._plan: Plan | None = None
        self._samples = self._tokens = self._sent = 0.0

    @property
    def steps(self) -> int:
        """Steps that can be compared since the last `collect`; the same on all ranks."""
        return len(self._rows) + max(len(self._unread) - self._lag, 0)

    def detach(self) -> None:
        """Watch no longer."""
        self.batches.detach()
        self._unwatch()

    def begin_batch(self) -> None:
        """A batch is on the device."""
        self._sent_before = self._run.bytes_sent
        self.batches.ready()

    def end_batch(self, batch: Any) -> None:
        """A batch is over. What it left is read later: on a GPU when the next one is over, on a CPU together
        with that of others, when they are compared, for caches are cold after a step.

        Args:
            batch: Whose samples and tokens are counted.
        """
        marks, recording = self.batches.end(), self._run.timeline.last
        if recording is self.last:  # the step was skipped
            return
        self.last = recording
        plan = self._run.last_plan
        assert plan is not None, "a step has run by a plan"
        sent = self._run.bytes_sent - self._sent_before
        self._unread.append(_Step(marks, recording, plan, self._run.batch_size or 0, tokens_of(batch), sent))
        if self._lag or len(self._unread) >= _MOST_UNREAD:
            self._read(self._lag)

    def _read(self, lag: int) -> None:
        offset = self._run.clock_offsets[self._run.pipeline_rank].nanoseconds
        while len(self._unread) > lag:
            step = self._unread.pop(0)
            events = list(step.recording)
            self._rows.append(row(self.batches.read(step.marks), step.recording, offset))
            for action, _, started, ended in events:
                self._durations[action.stage, action.kind].append(ended - started)
            self._note_size(step, events)
            if self._plan is None or step.plan.num_microbatches >= self._plan.num_microbatches:
                self._plan = step.plan
            self._samples += step.samples
            self._tokens += step.tokens
            self._sent += step.sent
            self.batch_size = max(self.batch_size, step.samples)

    def _note_size(self, step: _Step, events: Sequence[Event]) -> None:
        if step.samples:
            number = step.plan.num_microbatches
            busy = sum(ended - started for _, _, started, ended in events)
            self._by_size[step.samples / number].append(busy / number)

    @property
    def fixed_share(self) -> float | None:
        """The part of a micro-batch's time on this rank that does not fall with its size.

        From the largest size and a smaller one, such as that of an epoch's last batch; `None` without one.
        """
        sizes = sorted(self._by_size)
        if len(sizes) < 2:
            return None
        small, large = sizes[0], sizes[-1]
        less, more = median(self._by_size[small]), median(self._by_size[large])
        slope = (more - less) / (large - small)
        return min(max(1.0 - slope * large / more, 0.0), 1.0) if more > 0 else None

    def drop(self) -> None:
        """Forget the steps since the last `collect`: they are not like those to come."""
        self._read(self._lag)
        self._forget()
        self._by_size.clear()
        self._window_ends = []

    def collect(self, *, last: bool = False) -> Measurement | None:
        """Compare over all ranks; all of them must call. `None` where there is no step yet.

        Args:
            last: Whether to wait for what the device has not done yet.
        """
        window = self.window(last=last)
        return None if window is None else window.compared(self._run.gather_numbers(window.numbers))

    def window(self, *, last: bool = False) -> "Window | None":
        """This rank's numbers of the steps since the last time; `None` where there is no step yet.

        Args:
            last: Whether to wait for what the device has not done yet.
        """
        self._read(0 if last else self._lag)
        if not self._rows or self._plan is None:
            return None
        plan, steps = self._plan, len(self._rows)
        keys = [(stage, kind) for stage in range(plan.num_stages) for kind in KINDS]
        medians = [median(self._durations[key]) / 1e9 if key in self._durations else 0.0 for key in keys]
        flat = [number for numbers in self._rows for number in numbers]
        numbers = [*flat, *medians, self._samples, self._tokens, self._sent]
        self._forget()
        self._keep_aligned()
        return Window(numbers, lambda gathered: self._measurement(gathered, plan, steps, keys))

    def _keep_aligned(self) -> None:
        """Clocks that differ also drift, and so does a device's."""
        self._run.timeline.anchor()
        if any(offset.nanoseconds for offset in self._run.clock_offsets):
            self._run.align_clocks(_REALIGN)

    def _measurement(
        self, gathered: Gathered, plan: Plan, steps: int, keys: list[tuple[int, str]]
    ) -> Measurement:
        width, end = len(FIELDS), steps * len(FIELDS)
        ends: Sequence[float | None] = self._window_ends or [None] * len(gathered)
        shares = [
            share_out([[own[at : at + width] for at in range(0, end, width)] for own in ranks], before)
            for ranks, before in zip(gathered, ends, strict=True)
        ]
        self._window_ends = [each.window_end for each in shares]
        tails = [[own[end:] for own in ranks] for ranks in gathered]
        costs = {}
        for index, key in enumerate(keys):
            seen = [own[index] for ranks in tails for own in ranks if own[index] > 0]
            if seen:
                costs[key] = sum(seen) / len(seen)
        seconds, step, makespan = mean_of(shares)
        return Measurement(
            plan, steps, seconds, step, makespan, costs,
            samples=sum(ranks[0][-3] for ranks in tails),
            tokens=sum(ranks[0][-2] for ranks in tails),
            sent=[sum(r[rank][-1] for r in tails) / len(tails) for rank in range(plan.num_ranks)],
        )  # fmt: skip
