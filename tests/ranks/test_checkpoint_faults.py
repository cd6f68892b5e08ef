"""Whatever happens during a save, the next run finds the old checkpoint or the new one, whole."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_pipeline.checkpoint import ranks as together_module
from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder import faults
from lightning_pipeline.checkpoint.folder.commit import clean
from lightning_pipeline.errors import CheckpointWriteError
from tests.checkpoint_parts import load, same, save, stage, together, values
from tests.pool import Pool

Ranks = Callable[[int], Pool]


def at(point: str, rank: int, act: Callable[[], None]) -> Callable[[str], None]:
    def hook(name: str) -> None:
        if name == point and dist.get_rank() == rank:
            act()

    return hook


def save_twice_and_die(folder: str, over: bool, point: str, rank: int) -> str:
    ranks, path = together(), Path(folder)
    save(path / "last.ckpt", 1, ranks)
    soon = mock.patch.object(together_module, "_GRACE_SECONDS", 0.1)  # a dead rank says nothing more
    with soon, faults.injected(at(point, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))):
        try:
            save(path / ("last.ckpt" if over else "new.ckpt"), 2, ranks)
        except CheckpointWriteError as error:
            return str(error)
    return "saved"


def load_what_is_there(folder: str) -> dict[str, int]:
    """The step of each checkpoint that a look-up finds; each must be all of one save."""
    ranks, found = together(), {}
    for path in sorted(Path(folder).glob("*.ckpt")):
        tensors, optimizer, run = load(path, 9, ranks)
        found[path.name] = run()["global_step"]
        assert same(values(tensors, optimizer), values(*stage(found[path.name], ranks.rank)[:2]))
    return found


ALL = [(point, 0) for point in faults.SAVE_POINTS] + [(faults.SAVE_POINTS[1], 1)]


@pytest.mark.parametrize("over", [False, True], ids=["into a new folder", "over last"])
def test_kill_at_every_point_leaves_the_old_or_the_new(ranks: Ranks, tmp_path: Path, over: bool) -> None:
    after = faults.SAVE_POINTS.index("save.rename.after")
    for number, (point, rank) in enumerate(ALL):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcomes = ranks(2).outcomes(save_twice_and_die, str(folder), over, point, rank, timeout=20)
        passed = not over and point == "save.removal.during"  # nothing is removed there
        assert (outcomes[rank].exit_code == -signal.SIGKILL) != passed, (point, outcomes)
        if not passed:
            other = outcomes[1 - rank]
            assert other.seconds < 12 and "failed: global rank" in other.value
        renamed = passed or faults.SAVE_POINTS.index(point) >= after
        name = "last.ckpt" if over else "new.ckpt"
        found = {"last.ckpt": 1, **({name: 2} if renamed else {})}
        assert all(verify(path) for path in folder.glob("*.ckpt"))
        assert {path.name: verify(path).step for path in folder.glob("*.ckpt")} == found, point
        left = clean(folder)
        assert {path.name for path in folder.iterdir()} == set(found), (point, left)
    assert ranks(2)(load_what_is_there, str(folder)) == [found, found]


class CannotBePickled(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.lock = object


def save_failing(folder: str, kind: str) -> tuple[str, float, list[str]]:
    ranks, path = together(seconds=2), Path(folder) / "last.ckpt"
    told = Path(folder).with_name("told")
    save(path, 1, ranks)

    def act() -> None:
        if kind == "disk full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if kind == "stuck":
            while not told.exists():
                time.sleep(0.01)
            return
        raise CannotBePickled("this", "that")

    started = time.monotonic()
    with faults.injected(at("save.shard.during", 1, act)), pytest.raises(CheckpointWriteError) as caught:
        save(path, 2, ranks)
    told.touch()
    return str(caught.value), time.monotonic() - started, sorted(os.listdir(folder))


@pytest.mark.parametrize(("kind", "told"), [
    ("disk full", r"global rank 1: .*__1_0.distcp could not be written \(.* MiB free\).*No space left on device"),
    ("cannot be pickled", "CannotBePickled: this and that"),
    ("stuck", r"global rank 1 did not answer.*checkpoint_timeout=2 s"),
])  # fmt: skip
def test_every_rank_fails_with_the_cause_and_nothing_is_left(
    ranks: Ranks, tmp_path: Path, kind: str, told: str
) -> None:
    import re

    folder = tmp_path / "saves"
    folder.mkdir()
    for text, seconds, _ in ranks(2)(save_failing, str(folder), kind, timeout=30):
        assert re.search(told, text), text
        assert "last.ckpt" in text
        assert seconds < 10
    assert os.listdir(folder) == ["last.ckpt"]
    assert verify(folder / "last.ckpt").step == 1


def save_where_it_may_not(folder: str) -> str:
    with pytest.raises(CheckpointWriteError) as caught:
        save(Path(folder) / "file" / "a.ckpt", 1, together())
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_told_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for text in ranks(2)(save_where_it_may_not, str(tmp_path)):
        assert "global rank 0: FileExistsError" in text or "NotADirectoryError" in text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def save_one_key_twice(folder: str) -> str:
    from lightning_pipeline.checkpoint.save import write
    from tests.checkpoint_parts import part_of

    ranks = together()
    part = part_of(1, rank=0)
    part.owner = ranks.rank
    with pytest.raises(CheckpointWriteError) as caught:
        write(part, Path(folder) / "a.ckpt", ranks, "sha256")
    return str(caught.value)


def test_one_key_on_two_stages_is_refused_before_writing(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2)(save_one_key_twice, str(tmp_path)):
        assert "model.layer0.weight (pipeline ranks 0 and 1)" in text
    assert list(tmp_path.iterdir()) == []
