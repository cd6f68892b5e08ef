"""Times of a GPU's work, without waiting for it."""

import time

import pytest
import torch

from lightning_pipeline.recording.clock import StreamClock
from lightning_pipeline.recording.timeline import Timeline
from lightning_pipeline.schedules import Action


def test_actions_last_as_long_as_the_device_works_not_the_host() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        matrix @ matrix
    timeline = Timeline(StreamClock())
    timeline.watch()
    timeline.begin([Action(0, "F", 0), Action(0, "B", 0)])
    begin = time.monotonic_ns()
    for position, products in enumerate((20, 60)):
        timeline.ask(position)
        timeline.start()
        for _ in range(products):
            matrix @ matrix
        timeline.end()
    timeline.finish()
    given_out = time.monotonic_ns() - begin
    first, second = timeline.last
    over = time.monotonic_ns()
    assert given_out < timeline.finished - timeline.began, "the host did not wait"
    assert (second.ended - second.started) / (first.ended - first.started) == pytest.approx(3, rel=0.3)
    assert begin - 1_000_000 < first.asked <= first.started < first.ended <= second.asked
    assert second.ended <= over + 1_000_000
    assert timeline.last.settled
