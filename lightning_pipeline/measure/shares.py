"""What every second of a step went to, on every rank: arithmetic on times that were measured.

A rank's step runs from the end of the batch before to the end of this one. Over it lies the pipeline's
window: from the first start of an action on any rank to the last end.

    begin  fetch    ready  began   first                last  closing  stepped   end
      | other | data  | other |wait  |F wait F gap B ...  |other|optimizer| other |
    ==previous window==]    [=================== window ==================]
                            start-up                      drain
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pipeline.recording import Recording

KINDS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
WAITS = ("waiting_start", "waiting_steady", "waiting_drain")
CATEGORIES = (*KINDS.values(), *WAITS, "data", "optimizer", "other")

TIMES = ("begin", "fetch", "ready", "began", "first", "last", "closing", "stepped", "end")
FIELDS = (*TIMES, *KINDS.values(), "waiting_steady")


@dataclass(frozen=True)
class Around:
    """When a rank did what around the schedule of one batch, in nanoseconds.

    Args:
        begin: The end of the batch before, of a validation, or of what comes before an epoch's first batch.
        fetch: When it turned to the loader.
        ready: When the batch was on the device.
        closing: When the schedule was over and it turned to the gradients: averaging, clipping, step.
        stepped: When that was done.
        end: Of the batch.
    """

    begin: int
    fetch: int
    ready: int
    closing: int
    stepped: int
    end: int


def row(around: Around, recording: Recording, offset: int = 0) -> list[float]:
    """One step of a rank as numbers, in the order of `FIELDS`: times and durations in nanoseconds.

    Args:
        around: Outside the schedule.
        recording: Of the schedule.
        offset: Of the rank's clock, taken from all times.
    """
    spent = dict.fromkeys(KINDS, 0)
    first = last = recording.began
    steady = 0
    for position, (action, asked, started, ended) in enumerate(recording):
        spent[action.kind] += ended - started
        if position == 0:
            first = started
        else:
            steady += started - asked
        last = ended
    times = (
        around.begin, around.fetch, around.ready, recording.began, first, last,
        around.closing, around.stepped, around.end,
    )  # fmt: skip
    return [float(time - offset) for time in times] + [float(spent[kind]) for kind in KINDS] + [float(steady)]


@dataclass(frozen=True)
class Shares:
    """Where the time of some steps went, summed over the steps, in seconds.

    Args:
        seconds: Of each rank, by category.
        step: Of each rank, its steps' time: the sum of the categories.
        makespan: The pipeline's windows together.
        window_end: When the last window ended, in nanoseconds.
    """

    seconds: list[dict[str, float]]
    step: list[float]
    makespan: float
    window_end: float

    @property
    def bubble(self) -> float:
        """Idle share of all rank-time in the windows."""
        return sum(self.idle) / (len(self.idle) * self.makespan) if self.makespan else 0.0

    @property
    def idle(self) -> list[float]:
        """Of each rank, the time of the windows in which it ran no action."""
        return [self.makespan - sum(mine[kind] for kind in KINDS.values()) for mine in self.seconds]


def share_out(rows: Sequence[Sequence[Sequence[float]]], window_end: float | None = None) -> Shares:
    """Say where the time of some steps went.

    While a rank waits for others after its last action, whatever it does besides costs nothing: from there
    to the end of the window all is `waiting_drain`. What a rank does before its schedule begins may well be
    why others wait, so that `waiting_start` counts only from there, and from the window's beginning.

    Args:
        rows: By pipeline rank and step, as `row` makes them, all on one clock.
        window_end: Of the step before these, where there was one: `Shares.window_end`.
    """
    by_field = torch.tensor(rows, dtype=torch.float64).permute(2, 0, 1)  # (field, rank, step)
    at = dict(zip(FIELDS, by_field, strict=True))
    open_at, close_at = at["first"].amin(0), at["last"].amax(0)
    before = torch.full_like(close_at, float("-inf") if window_end is None else window_end)
    before[1:] = close_at[:-1]
    found = _categories(at, open_at, close_at, before)
    seconds = {name: (found[name].sum(1) / 1e9).tolist() for name in CATEGORIES}
    return Shares(
        [{name: seconds[name][rank] for name in CATEGORIES} for rank in range(len(rows))],
        ((at["end"] - at["begin"]).sum(1) / 1e9).tolist(),
        float((close_at - open_at).sum()) / 1e9,
        float(close_at[-1]),
    )


def _categories(
    at: Mapping[str, Tensor], open_at: Tensor, close_at: Tensor, before: Tensor
) -> dict[str, Tensor]:
    """Nanoseconds by rank and step, of each category; the fields likewise, and the windows by step."""
    held = torch.minimum(torch.maximum(before, at["begin"]), at["first"])  # by the drain of the step before
    waits = torch.minimum(torch.maximum(torch.maximum(open_at, at["began"]), held), at["first"])

    def leading(start: Tensor, end: Tensor) -> Tensor:
        return (end - torch.maximum(start, held)).clamp(min=0)

    def trailing(start: Tensor, end: Tensor) -> Tensor:
        return (end - torch.maximum(start, close_at)).clamp(min=0)

    found = {kind: at[kind] for kind in KINDS.values()}
    gaps = at["last"] - at["first"] - sum(found.values()) - at["waiting_steady"]
    found["waiting_start"] = at["first"] - waits
    found["waiting_steady"] = at["waiting_steady"]
    found["waiting_drain"] = held - at["begin"] + torch.minimum(close_at, at["end"]) - at["last"]
    found["data"] = leading(at["fetch"], at["ready"])
    found["optimizer"] = trailing(at["closing"], at["stepped"])
    found["other"] = (
        leading(at["begin"], at["fetch"]) + leading(at["ready"], waits) + gaps
        + trailing(at["last"], at["closing"]) + trailing(at["stepped"], at["end"])
    )  # fmt: skip
    return found
