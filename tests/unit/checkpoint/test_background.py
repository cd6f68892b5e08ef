"""Work in the background: what waits for it happens once it went well, and never when it failed."""

import threading
import time
from pathlib import Path

import pytest

from lightning_pipeline.checkpoint.background import Background
from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder.pace import Pace
from lightning_pipeline.checkpoint.retention import Retention
from tests.checkpoint_parts import save


def test_what_waits_happens_after_the_work_and_in_order() -> None:
    background, free, seen = Background(), threading.Event(), []

    def work(pace: Pace) -> None:
        assert free.wait(10)
        seen.append("work")

    background.start(work)
    background.later(lambda: seen.append("first"))
    background.later(lambda: seen.append("second"))
    assert seen == []
    free.set()
    background.wait()
    background.later(lambda: seen.append("at once"))
    assert seen == ["work", "first", "second", "at once"]


@pytest.mark.parametrize("told_before", [False, True], ids=["in flight", "failed already"])
def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path: Path, told_before: bool) -> None:
    save(tmp_path / "a.ckpt", 1)
    background, free = Background(), threading.Event()
    retention = Retention(background.later)

    def fail(pace: Pace) -> None:
        assert free.wait(10)
        raise OSError("No space left on device")

    background.start(fail)
    if told_before:
        free.set()
        thread = background._thread
        assert thread is not None
        thread.join(10)
    retention.remove(tmp_path / "a.ckpt")
    retention.link(tmp_path / "b.ckpt", tmp_path / "last.ckpt")
    free.set()
    with pytest.raises(OSError, match="No space left"):
        background.wait()
    assert verify(tmp_path / "a.ckpt").step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def paced(pace: Pace, turns: int, seconds: float) -> float:
    begin = time.perf_counter()
    for _ in range(turns):
        with pace:
            time.sleep(seconds)
    return time.perf_counter() - begin


def test_work_rests_three_times_as_long_as_it_worked() -> None:
    assert paced(Pace(), 5, 0.01) >= 4 * 5 * 0.01


@pytest.mark.quiet  # times are compared with a clock
def test_work_that_hangs_does_not_double_the_wait() -> None:
    assert paced(Pace(), 1, 1.5) < 1.5 + 1.4


@pytest.mark.quiet  # times are compared with a clock
def test_rests_take_a_part_of_the_timeout_only() -> None:
    background, seconds = Background(rests_for=0.1), []
    background.start(lambda pace: seconds.append(paced(pace, 20, 0.02)))
    thread = background._thread
    assert thread is not None
    thread.join(10)  # `wait` would end the rests
    assert 20 * 0.02 <= seconds[0] < 2 * 20 * 0.02  # four times with all rests


@pytest.mark.quiet  # times are compared with a clock
def test_work_that_is_waited_for_does_not_rest() -> None:
    background, seconds = Background(), []

    def work(pace: Pace) -> None:
        with pace:
            time.sleep(0.1)  # and rests for longer, were it not waited for
        seconds.append(paced(pace, 10, 0.02))

    background.start(work)
    begin = time.perf_counter()
    background.wait()
    assert seconds[0] < 1.5 * 10 * 0.02
    assert time.perf_counter() - begin < 1.5 * (0.1 + 10 * 0.02)


def test_an_asynchronous_save_is_paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr(Pace, "__enter__", lambda self: entered.append(self))
    monkeypatch.setattr(Pace, "__exit__", lambda self, *error: None)
    save(tmp_path / "a.ckpt", 1)
    assert not entered
    save(tmp_path / "b.ckpt", 1, pace=Pace())
    assert len(set(map(id, entered))) == 1
