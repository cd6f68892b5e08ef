"""Clocks of ranks, and the clock of a device's stream, without either."""

import queue
import random
import threading
from typing import Any

import pytest

from lightning_pipeline.ranks.alignment import Offset, align
from lightning_pipeline.recording import clock
from lightning_pipeline.recording.clock import StreamClock
from lightning_pipeline.recording.timeline import Timeline
from lightning_pipeline.schedules import Action


class Mail:
    """A wire between threads, slow by chance and never equally in both directions."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], "queue.Queue[tuple[int, int]]"]) -> None:
        self.rank, self.boxes = rank, boxes

    def send(self, peer: int, first: int, second: int) -> None:
        self.boxes[self.rank, peer].put((first, second))

    def receive(self, peer: int) -> tuple[int, int]:
        return self.boxes[peer, self.rank].get(timeout=10)


def aligned(shifts: list[int]) -> list[list[Offset]]:
    """What each rank finds where clock r is ahead by `shifts[r]`."""
    size = len(shifts)
    boxes: Any = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    found: list[Any] = [None] * size

    def live(rank: int) -> None:
        found[rank] = align(
            Mail(rank, boxes), rank, size, exchanges=16, clock=lambda: clock.now() + shifts[rank]
        )

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_a_shifted_clock_is_found_within_half_a_round_trip() -> None:
    shifts = [0, 3_000_000_000, -7_000_000_000]
    found = aligned(shifts)
    assert found[0] == found[1] == found[2]
    for offset, shift in zip(found[0], shifts, strict=True):
        assert abs(offset.nanoseconds - shift) <= offset.round_trip / 2 + 1


def test_ranks_of_one_machine_share_their_clock_exactly() -> None:
    assert [offset.nanoseconds for offset in aligned([0, 0, 0])[0]] == [0, 0, 0]


class Stream:
    """A device that does its work later than the host hands it out."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.waited = self.made = 0

    def work(self, milliseconds: float) -> None:
        self.free_at = max(self.free_at, clock.now() / 1e6) + milliseconds

    def event(self) -> "StreamEvent":
        self.made += 1
        return StreamEvent(self)

    def synchronize(self) -> None:
        self.waited += 1
        self.free_at = 0.0


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, 0.0

    def record(self) -> None:
        self.at = max(self.stream.free_at, clock.now() / 1e6)

    def query(self) -> bool:
        return self.at <= clock.now() / 1e6

    def synchronize(self) -> None:
        self.stream.waited += 1

    def elapsed_time(self, end_event: "StreamEvent") -> float:
        return end_event.at - self.at


ACTIONS = [Action(0, "F", 0), Action(0, "B", 0)]


def test_a_stream_s_times_are_when_the_device_worked_not_when_the_host_asked() -> None:
    stream = Stream()
    timeline = Timeline(StreamClock(stream.event, stream.synchronize))
    timeline.watch()
    waited = stream.waited
    begin = clock.now()
    timeline.begin(ACTIONS)
    for position, milliseconds in enumerate([400.0, 800.0]):
        timeline.ask(position)
        timeline.start()
        stream.work(milliseconds)
        timeline.end()
    timeline.finish()
    assert stream.waited == waited, "nothing waits for the device inside the step"
    assert not timeline.last.settled
    events = list(timeline.last)
    took = [(event.ended - event.started) / 1e6 for event in events]
    assert took == pytest.approx([400, 800], abs=50)
    assert (events[0].started - begin) / 1e6 == pytest.approx(0, abs=50)
    assert events[1].asked == events[0].ended
    assert timeline.finished >= events[1].ended
    assert timeline.last.settled


def run_once(timeline: Timeline) -> None:
    timeline.begin(ACTIONS)
    for position in range(2):
        timeline.ask(position)
        timeline.start()
        timeline.end()
    timeline.finish()


def test_events_are_recorded_only_while_somebody_watches() -> None:
    stream = Stream()
    timeline = Timeline(StreamClock(stream.event, stream.synchronize))
    anchor = stream.made
    run_once(timeline)
    assert (stream.made, len(list(timeline.work)), len(list(timeline))) == (anchor, 0, 2)
    ends = [timeline.watch(), timeline.watch()]
    ends[0]()
    ends[0]()
    run_once(timeline)
    assert (stream.made, len(list(timeline.work))) == (anchor + 8, 2)
    ends[1]()
    run_once(timeline)
    assert (stream.made, len(list(timeline.work))) == (anchor + 8, 0)


def test_events_that_were_read_are_recorded_again() -> None:
    stream = Stream()
    timeline = Timeline(StreamClock(stream.event, stream.synchronize))
    timeline.watch()
    before = timeline.last
    for _ in range(5):  # each step is read one later, as monitors do
        run_once(timeline)
        assert len(list(before)) in (0, 2)
        before = timeline.last
    assert stream.made == 1 + 2 * 8


def test_a_mark_that_nobody_watches_is_the_host_s() -> None:
    stream = Stream()
    timeline = Timeline(StreamClock(stream.event, stream.synchronize))
    before = timeline.mark()
    end = timeline.watch()
    stream.work(30.0)
    during = timeline.mark()
    end()
    first, second, third = timeline.read([before, during, timeline.mark()])
    assert first < third < second


def test_marks_before_a_new_anchor_keep_theirs() -> None:
    stream = Stream()
    times = StreamClock(stream.event, stream.synchronize)
    before = times.mark()
    times.anchor()
    after = times.mark()
    first, second = times.read([before, after])
    assert 0 <= second - first < 100_000_000


def test_an_error_message_of_a_stream_never_waits_for_the_device() -> None:
    stream = Stream()
    timeline = Timeline(StreamClock(stream.event, stream.synchronize))
    timeline.begin(ACTIONS)
    timeline.ask(0)
    timeline.start()
    stream.work(random.random())
    waited = stream.waited
    assert "0F0: working since" in timeline.recent()[-1]
    assert stream.waited == waited
