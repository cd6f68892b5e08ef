"""Streams and events of a device that works later than the host asks, for tests without one.

What is given to a stream is done by a thread, one operation after the other. `LANES=1` lets all streams of a
process share one such queue, in the order in which the host gave work out: that is all that CUDA promises.
`LANES=k` has k of them, `LANES=0` one for each stream.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

_PATIENCE = 60.0


class Queue:
    """Does what it is given, in order, in a thread of its own."""

    gate: ClassVar[threading.Event] = threading.Event()
    """While it is not set, no queue of this process does anything."""
    errors: ClassVar[list[str]] = []
    shared: ClassVar[list["Queue"]] = []
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        self._operations: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    @classmethod
    def of_next_stream(cls) -> "Queue":
        """That of a stream that is made now, by `LANES`."""
        number = int(os.environ.get("LANES", "1"))
        if number == 0:
            return cls()
        while len(cls.shared) < number:
            cls.shared.append(cls())
        cls.made += 1
        return cls.shared[(cls.made - 1) % number]

    @classmethod
    def forget(cls) -> None:
        """New streams get new queues."""
        cls.shared, cls.made = [], 0
        cls.errors.clear()

    def put(self, operation: Callable[[], object]) -> None:
        """Do it when all before is done."""
        self._operations.put(operation)

    def _work(self) -> None:
        while True:
            operation = self._operations.get()
            Queue.gate.wait()
            try:
                with torch.inference_mode():
                    operation()
            except Exception as error:  # a device has no caller to raise in
                Queue.errors.append(f"{type(error).__name__}: {error}")


Queue.gate.set()


class Stream:
    """A stream of the device; it makes its own queue or shares one."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.queue = Queue.of_next_stream()

    def synchronize(self) -> None:
        """Wait, on the host, for what was given to the stream."""
        event = Event()
        event.record(self)
        event.synchronize()

    def wait_stream(self, other: "Stream") -> None:
        """What comes now waits for what the other has been given."""
        event = Event()
        event.record(other)
        event.wait(self)

    def wait_event(self, event: "Event") -> None:
        """What comes now waits for an event."""
        event.wait(self)


class Event:
    """A place in a stream."""

    host_waits: ClassVar[int] = 0
    """How often the host of this process waited for one."""

    def __init__(self, **kwargs: object) -> None:
        self._reached: threading.Event | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Put it behind what the stream was given."""
        self._reached = reached = threading.Event()
        (stream or current()).queue.put(reached.set)

    def wait(self, stream: Stream | None = None) -> None:
        """What the stream is given from now on waits."""
        reached = self._reached
        if reached is not None:
            (stream or current()).queue.put(lambda: _until(reached))

    def query(self) -> bool:
        """Whether the stream has come there."""
        return self._reached is None or self._reached.is_set()

    def synchronize(self) -> None:
        """Wait for it on the host."""
        Event.host_waits += 1
        if self._reached is not None:
            _until(self._reached)


def _until(reached: threading.Event) -> None:
    if not reached.wait(_PATIENCE):
        raise TimeoutError("an event of a stream was not reached")


class _Current(threading.local):
    stream: Stream | None = None


_current = _Current()
_default: list[Stream] = []


def current() -> Stream:
    """The stream that this thread gives work to."""
    if _current.stream is not None:
        return _current.stream
    if not _default:
        _default.append(Stream())
    return _default[0]


@contextmanager
def using(stream: Stream) -> Iterator[None]:
    """Work of the block goes to a stream."""
    before, _current.stream = _current.stream, stream
    try:
        yield
    finally:
        _current.stream = before


def forget() -> None:
    """Begin anew, with other `LANES`."""
    Queue.forget()
    _default.clear()
    Event.host_waits = 0


@contextmanager
def held() -> Iterator[None]:
    """The device does nothing in the block."""
    Queue.gate.clear()
    try:
        yield
    finally:
        Queue.gate.set()
