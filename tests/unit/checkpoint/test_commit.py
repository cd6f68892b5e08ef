"""A name leads to a whole checkpoint before, during and after a save, also where names cannot be swapped."""

import os
from pathlib import Path

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder import commit, faults
from lightning_pipeline.checkpoint.folder.names import beside, local_path
from lightning_pipeline.checkpoint.retention import Retention
from lightning_pipeline.errors import CheckpointError, CheckpointWriteError
from tests.checkpoint_parts import save


@pytest.fixture(params=["exchange", "links"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "links":
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    return str(request.param)


def test_the_name_always_leads_to_a_whole_checkpoint(tmp_path: Path, way: str) -> None:
    path, seen = tmp_path / "last.ckpt", []
    save(path, 1)

    def look(point: str) -> None:
        seen.append((point, verify(path).step))

    with faults.injected(look):
        save(path, 2)
    steps = dict(seen)
    assert list(steps) == list(faults.SAVE_POINTS)
    assert [steps[point] for point in faults.SAVE_POINTS] == [1] * 6 + [2] * 3
    assert path.is_symlink() == (way == "links")
    assert len(list(tmp_path.iterdir())) == (2 if way == "links" else 1)


@pytest.mark.parametrize("point", faults.SAVE_POINTS[:6])
def test_an_error_before_the_rename_leaves_the_old(tmp_path: Path, way: str, point: str) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    before = sorted(os.listdir(tmp_path))

    def fail(name: str) -> None:
        if name == point:
            raise OSError("no more")

    with faults.injected(fail), pytest.raises(CheckpointError, match="no more"):
        save(path, 2)
    assert verify(path).step == 1
    assert sorted(os.listdir(tmp_path)) == before


def test_a_one_file_checkpoint_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("from one device")
    save(path, 2)
    assert verify(path).step == 2
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link to a folder"])
def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path, linked: bool) -> None:
    results, path = tmp_path / "results", tmp_path / "link" if linked else tmp_path / "results"
    results.mkdir()
    (results / "thesis.txt").write_text("years of work")
    if linked:
        path.symlink_to("results")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        CheckpointWriteError, match=r"is a folder with thesis\.txt in it and no checkpoint.*last"
    ):
        save(path, 1)
    assert sorted(os.listdir(tmp_path)) == before and os.listdir(results) == ["thesis.txt"]


@pytest.mark.parametrize("name", ["", ".metadata", "manifest.json"])
def test_an_empty_folder_and_what_is_left_of_a_checkpoint_are_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.ckpt"
    path.mkdir()
    if name:
        (path / name).write_text("damaged")
    save(path, 1)
    assert verify(path).step == 1


def test_what_a_link_leads_to_is_kept_until_it_leads_elsewhere(tmp_path: Path) -> None:
    retention = Retention(lambda action: action())
    first, second, last = (tmp_path / name for name in ("a.ckpt", "b.ckpt", "last.ckpt"))
    save(first, 1)
    retention.link(first, last)
    save(second, 2)
    retention.remove(first)
    assert verify(last).step == 1
    retention.link(second, last)
    assert verify(last).step == 2
    assert sorted(os.listdir(tmp_path)) == ["b.ckpt", "last.ckpt"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = beside(tmp_path / "a.ckpt", "partial")
    dead = dead.with_name(dead.name.replace(f"-{os.getpid()}-", "-4194999-"))
    living = beside(tmp_path / "a.ckpt", "partial")
    living = living.with_name(living.name.replace(f"-{os.getpid()}-", f"-{os.getppid()}-"))
    for folder in (dead, living):
        folder.mkdir()
    assert commit.clean(tmp_path) == [dead]
    assert list(tmp_path.iterdir()) == [living]


def test_no_look_up_of_lightning_finds_a_leftover(tmp_path: Path) -> None:
    save(tmp_path / "hpc_ckpt_3.ckpt", 1)
    for mark in ("partial", "old", "data"):
        beside(tmp_path / "hpc_ckpt_4.ckpt", mark).mkdir()
        beside(tmp_path / "last.ckpt", mark).mkdir()
    saver = ModelCheckpoint(tmp_path)
    run = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", devices=1, logger=False, callbacks=[saver],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    saver.setup(run, LightningModule(), "validate")
    connector = run._checkpoint_connector
    assert connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_3.ckpt")
    assert connector.hpc_save_path(tmp_path) == str(tmp_path / "hpc_ckpt_4.ckpt")
    assert saver._find_last_checkpoints(run) == set()


def test_leftovers_of_earlier_versions_are_known(tmp_path: Path) -> None:
    new = beside(tmp_path / "a.ckpt", "partial")
    old = new.with_name(f"a.ckpt.{new.name}")
    old.mkdir()
    assert commit.clean(tmp_path) == [old]


def test_remote_paths_are_refused() -> None:
    assert local_path("file:///tmp/a") == Path("/tmp/a")
    with pytest.raises(CheckpointError, match="s3://bucket/a.ckpt' is remote"):
        local_path("s3://bucket/a.ckpt")
