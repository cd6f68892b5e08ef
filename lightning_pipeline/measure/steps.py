"""One step as all ranks of a pipeline lived it, on one clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pipeline.measure.pipeline_run import PipelineRun
from lightning_pipeline.recording import Event, Message, Recording


@dataclass(frozen=True)
class RankStep:
    """What one rank did in one step. Plain data; times are nanoseconds on pipeline rank 0's clock.

    Args:
        rank: Of the pipeline.
        stages: That it holds.
        began: When it began to run the plan.
        finished: When it had run it and all its messages were delivered.
        events: Its actions, in order.
        messages: What it sent and received, in order; empty where that was not recorded.
        around: What it did around the schedule: `data`, `reduction` or `optimizer`, from when to when.
    """

    rank: int
    stages: tuple[int, ...]
    began: int
    finished: int
    events: tuple[Event, ...]
    messages: tuple[Message, ...] = ()
    around: tuple[tuple[str, int, int], ...] = ()


def gather_step(
    run: PipelineRun,
    recording: Recording | None = None,
    around: Sequence[tuple[str, int, int]] = (),
    messages: Sequence[Message] | None = None,
) -> list[RankStep]:
    """One step of every rank of this replica, by pipeline rank; all its ranks must call.

    The first call aligns the clocks if nobody has done so; `run.align_clocks()` does it anew. On a GPU a
    recording of the step before costs no waiting: keep `run.timeline.last` and give it one step later.

    Args:
        run: The strategy, as `run_of` gives it.
        recording: Of the step on this rank, the same step on all of them. Default: of the last run.
        around: What this rank did around the schedule, by this rank's clock.
        messages: Of that step on this rank. Default: those of the last run, if that is the step.
    """
    if not run.clock_offsets:
        run.align_clocks()
    recording = recording or run.timeline.last
    log = run.messages if recording is run.timeline.last else None
    if messages is None:
        messages = log.messages if log is not None else []
    gathered = run.gather_from_pipeline(
        (
            run.stages_here,
            recording.began,
            recording.finished,
            [tuple(event) for event in recording],
            [tuple(message) for message in messages],
            list(around),
        )
    )
    return [
        _on_one_clock(rank, values, run.clock_offsets[rank].nanoseconds)
        for rank, values in enumerate(gathered)
    ]


def _on_one_clock(rank: int, values: Any, offset: int) -> RankStep:
    stages, began, finished, events, messages, around = values
    moved = tuple(
        Event(action, asked - offset, started - offset, ended - offset)
        for action, asked, started, ended in events
    )
    told = tuple(
        Message(action, peer, num_bytes, begin - offset, end - offset)
        for action, peer, num_bytes, begin, end in messages
    )
    beside = tuple((kind, begin - offset, end - offset) for kind, begin, end in around)
    return RankStep(rank, stages, began - offset, finished - offset, moved, told, beside)
