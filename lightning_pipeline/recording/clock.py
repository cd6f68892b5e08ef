"""Clocks: the host's, and a device stream's that is read without waiting for the device."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Mark = Any
"""A moment: nanoseconds on the host, an event on a stream."""


now: Callable[[], int] = time.monotonic_ns
"""The host's clock; processes of one machine share it."""


class StreamEvent(Protocol):
    """What is asked of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Put the event behind all work given to the current stream so far."""
        ...

    def query(self) -> bool:
        """Whether the stream has come to it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another; both must have been reached."""
        ...


class StreamClock:
    """Marks moments on a device's stream without waiting for it, and tells their times later.

    Times are those of the host's monotonic clock: one event, the anchor, is recorded while the stream is
    empty, when its time on the host is known, and others are measured from it.

    Args:
        make_event: Makes an event for the current stream. Default: CUDA's.
        synchronize: Waits until the stream is empty. Default: CUDA's.
    """

    def __init__(
        self,
        make_event: Callable[[], StreamEvent] | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._make = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._synchronize = synchronize or torch.cuda.synchronize
        self._free: list[StreamEvent] = []
        self.anchor()

    def anchor(self) -> None:
        """Tie the stream's time to the host's anew; waits for the stream. The driver's milliseconds are
        float32, so that times far from the anchor are coarse: 4 us a minute away, 0.25 ms an hour away.
        """
        self._synchronize()
        event = self._make()
        before = now()
        event.record()
        event.synchronize()
        self._anchor, self._anchored = event, (before + now()) // 2

    def mark(self) -> Mark:
        """This point of the stream, which the device reaches when all work before is done."""
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event, self._anchor, self._anchored

    def reuse(self, marks: Sequence[Mark]) -> None:
        """Take back the events of marks that nobody else has, and that were read."""
        self._free += [event for event, *_ in marks]

    def reached(self, mark: Mark) -> bool:
        """Whether the device has come to a mark."""
        reached: bool = mark[0].query()
        return reached

    def read(self, marks: Sequence[Mark]) -> list[int]:
        """Nanoseconds of each mark on the host's clock. Waits for the last one."""
        if marks:
            marks[-1][0].synchronize()
        return [since + round(1e6 * anchor.elapsed_time(event)) for event, anchor, since in marks]


def stream_clock(device: torch.device) -> StreamClock | None:
    """The clock of a device that works by itself; `None` for the CPU, which is its own clock."""
    return StreamClock() if device.type == "cuda" else None
