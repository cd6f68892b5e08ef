"""A disk that is full, or may not be written to: every rank is told why, and the checkpoint before stands."""

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.contents.meta_file import as_bytes
from lightning_pipeline.checkpoint.save import Part, write
from lightning_pipeline.errors import CheckpointWriteError
from tests.checkpoint_parts import ABOUT, save, together
from tests.pool import Pool

Ranks = Callable[[int], Pool]
MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "lightning-pipeline-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system; a limit on file sizes stands in for it")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def save_too_much(folder: str, limited: bool) -> str:
    """One save that fits and one whose shards have 3 MiB each."""
    ranks, path = together(), Path(folder) / "last.ckpt"
    save(path, 1, ranks)
    state = {"model": {f"w{ranks.rank}": torch.ones(3 * MIB // 4)}}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limited and ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(CheckpointWriteError) as caught:
            write(Part(state, ranks.rank, {}, as_bytes({}), {**ABOUT, "step": 2}), path, ranks, "sha256")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = os.listdir(folder) if ranks.leads else ["last.ckpt"]  # the leader cleans up
    assert left == ["last.ckpt"]
    save(Path(folder) / "next.ckpt", 3, ranks)
    return str(caught.value)


def check_after(texts: list[str], folder: Path, told: str) -> None:
    for text in texts:
        assert "last.ckpt failed on global rank" in text
        assert "_0.distcp could not be written" in text and told in text
    assert sorted(os.listdir(folder)) == ["last.ckpt", "next.ckpt"]
    assert [verify(folder / name).step for name in ("last.ckpt", "next.ckpt")] == [1, 3]


def test_a_full_disk_is_told_on_every_rank(ranks: Ranks, small_disk: Path) -> None:
    texts = ranks(2)(save_too_much, str(small_disk), False)
    check_after(texts, small_disk, os.strerror(errno.ENOSPC))
    assert all(" MiB free)" in text for text in texts)


def test_a_limit_on_file_sizes_is_told_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    texts = ranks(2)(save_too_much, str(tmp_path), True)
    check_after(texts, tmp_path, os.strerror(errno.EFBIG))
    assert all("global rank 1" in text for text in texts)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder with a checkpoint into which nothing can be written, by root neither."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    save(folder / "last.ckpt", 1)
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    bind = [["mount", "--bind", folder, folder], ["mount", "-o", "remount,bind,ro", folder]]
    if subprocess.run(bind[0], check=False, capture_output=True).returncode != 0:
        pytest.skip("root needs the right to mount to make a folder that it cannot write to")
    try:
        subprocess.run(bind[1], check=True)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def save_where_nothing_can_be_written(folder: str) -> str:
    with pytest.raises(CheckpointWriteError) as caught:
        save(Path(folder) / "last.ckpt", 2, together())
    return str(caught.value)


def test_a_read_only_folder_is_told_on_every_rank(ranks: Ranks, read_only: Path) -> None:
    for text in ranks(2)(save_where_nothing_can_be_written, str(read_only)):
        assert str(read_only / "last.ckpt") in text and "global rank 0" in text
        assert os.strerror(errno.EROFS) in text or os.strerror(errno.EACCES) in text
    assert os.listdir(read_only) == ["last.ckpt"]
    assert verify(read_only / "last.ckpt").step == 1
