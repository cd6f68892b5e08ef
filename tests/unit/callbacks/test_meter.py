"""A rank's steps are collected; those of a device are read one step later."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipeline.measure.meter import Meter
from lightning_pipeline.measure.shares import FIELDS
from lightning_pipeline.ranks.alignment import Offset
from lightning_pipeline.recording.clock import StreamClock
from lightning_pipeline.recording.timeline import Timeline
from lightning_pipeline.schedules import Plan
from tests.unit.runtime.test_clock import Stream

PLAN = Plan.parse("0F0 0B0")


class Run:
    """A pipeline of one rank."""

    pipeline_rank, bytes_sent, batch_size, last_plan = 0, 0, 8, PLAN

    def __init__(self, stream: Stream | None) -> None:
        clock = None if stream is None else StreamClock(stream.event, stream.synchronize)
        self.timeline, self.stream = Timeline(clock), stream
        self.clock_offsets: list[Offset] = []

    def align_clocks(self, exchanges: int = 8) -> list[Offset]:
        self.clock_offsets = [Offset()]
        return self.clock_offsets

    @staticmethod
    def before_fetch(trainer: Any, call: Any) -> Any:
        return lambda: None

    @staticmethod
    def gather_numbers(values: list[float]) -> list[list[list[float]]]:
        return [[list(values)]]

    def step(self, meter: Meter, milliseconds: float) -> None:
        meter.begin_batch()
        self.timeline.begin(PLAN[0])
        for position in range(2):
            self.timeline.ask(position)
            self.timeline.start()
            if self.stream is not None:
                self.stream.work(milliseconds)
            self.timeline.end()
        self.timeline.finish()
        meter.batches.close()
        meter.batches.gradients_done()
        meter.end_batch(None)


def meter_of(run: Run) -> Meter:
    return Meter(run, SimpleNamespace(optimizers=[]))  # type: ignore[arg-type]


def test_on_the_host_a_step_is_read_at_its_end() -> None:
    run = Run(None)
    meter = meter_of(run)
    run.step(meter, 0)
    assert meter.steps == 1
    measured = meter.collect()
    assert measured is not None
    assert (measured.steps, measured.samples) == (1, 8)
    assert meter.collect() is None


def test_on_a_device_a_step_is_read_in_the_next_one_and_the_last_at_the_end() -> None:
    stream = Stream()
    run = Run(stream)
    meter = meter_of(run)
    waited = stream.waited
    run.step(meter, 30.0)
    assert (meter.steps, stream.waited) == (0, waited), "nothing waits for the device in the first step"
    assert meter.collect() is None
    run.step(meter, 90.0)
    assert meter.steps == 1
    first = meter.collect()
    assert first is not None
    assert first.seconds[0]["forward"] == pytest.approx(0.03, abs=0.01)
    rest = meter.collect(last=True)
    assert rest is not None
    assert rest.steps == 1
    assert rest.seconds[0]["backward"] == pytest.approx(0.09, abs=0.02)
    assert rest.costs[0, "F"] == pytest.approx(0.09, abs=0.02)


def test_a_batch_without_a_step_counts_for_nothing() -> None:
    run = Run(None)
    meter = meter_of(run)
    run.step(meter, 0)
    meter.begin_batch()
    meter.end_batch(None)
    assert meter.steps == 1


class Ahead(Run):
    """Another rank goes on for a second after each of this one's last actions."""

    @staticmethod
    def gather_numbers(values: list[float]) -> list[list[list[float]]]:
        later = list(values)
        later[FIELDS.index("last")] += 1e9
        return [[list(values), later]]


def test_the_drain_of_a_step_reaches_into_the_next_measurement() -> None:
    run = Ahead(None)
    meter = meter_of(run)
    run.step(meter, 0)
    assert meter.collect() is not None
    time.sleep(0.05)
    run.step(meter, 0)
    measured = meter.collect()
    assert measured is not None
    assert measured.seconds[0]["waiting_drain"] >= 0.05
    assert measured.seconds[0]["other"] < 0.02


def test_two_sizes_of_micro_batches_tell_the_part_that_is_fixed() -> None:
    run = Run(Stream())
    meter = meter_of(run)
    assert meter.fixed_share is None
    for samples, milliseconds in ((8, 10.0), (8, 10.0), (4, 6.0), (4, 6.0)):  # 2 ms, and 1 ms a sample
        run.batch_size = samples
        run.step(meter, milliseconds)
    meter.collect(last=True)
    assert meter.fixed_share == pytest.approx(0.2, rel=0.01)
