"""Work in the background: what waits for it happens once it went well, and never when it failed."""

import threading
from pathlib import Path

import pytest

from lightning_pipeline.checkpoint.background import Background
from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.retention import Retention
from tests.checkpoint_parts import save


def test_what_waits_happens_after_the_work_and_in_order() -> None:
    background, free, seen = Background(), threading.Event(), []

    def work() -> None:
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

    def fail() -> None:
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
