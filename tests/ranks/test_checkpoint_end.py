"""A save in the background that is in flight when a run ends: it is waited for, and its failure is raised."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder import faults
from lightning_pipeline.patching import standing
from tests.pool import Pool
from tests.ranks.checkpoint_cases import names_in
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
BACKGROUND = {"stages": 2, "num_microbatches": 2, "async_save": True}


class SavesLate(Regression):
    """Saves in hooks that come after those of all callbacks."""

    folder = ""

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(f"{self.folder}/fitted.ckpt")

    def on_validation_end(self) -> None:
        if self.trainer.validating:
            self.trainer.save_checkpoint(f"{self.folder}/validated.ckpt")


def slowly(name: str) -> None:
    """A model larger than this one."""
    if name == "save.shard.before":
        time.sleep(0.3)


def fit_and_validate(folder: str) -> list[list[str]]:
    module, found = SavesLate(), []
    module.folder = folder
    run = trainer(BACKGROUND, max_epochs=1)
    with faults.injected(slowly):
        run.fit(module, loader())
        found.append(names_in(Path(folder)))
        run.validate(module, loader(), verbose=False)
        found.append(names_in(Path(folder)))
    return found


def test_what_late_hooks_save_is_there_when_the_run_returns(ranks: Ranks, tmp_path: Path) -> None:
    for fitted, validated in ranks(2)(fit_and_validate, str(tmp_path)):
        assert fitted == ["fitted.ckpt"]
        assert validated == ["fitted.ckpt", "validated.ckpt"]
    assert [verify(tmp_path / name).step for name in ("fitted.ckpt", "validated.ckpt")] == [3, 3]


def fail_in_the_last_save(folder: str, rank: int) -> str:
    module = SavesLate()
    module.folder = folder
    run = trainer(BACKGROUND, max_epochs=1)

    def fail(name: str) -> None:
        slowly(name)
        if name == "save.shard.after" and run.global_rank == rank:
            raise OSError("the disk is gone")

    with faults.injected(fail), pytest.raises(Exception, match="the disk is gone"):
        run.fit(module, loader())
    again = trainer(BACKGROUND, max_epochs=1)
    again.fit(Regression(), loader())
    return f"{run.state.status.value} {again.state.status.value}"


def test_the_failure_of_the_last_save_is_raised(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(fail_in_the_last_save, str(tmp_path), 1) == ["interrupted finished"] * 2
    assert names_in(tmp_path) == []


class RemovesLate(SavesLate):
    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(f"{self.folder}/first.ckpt")
        super().on_train_end()
        self.trainer.strategy.remove_checkpoint(f"{self.folder}/first.ckpt")


def fail_in_the_last_removal(folder: str) -> tuple[str, float, list[str]]:
    """Only global rank 0 removes."""
    module = RemovesLate()
    module.folder = folder

    def fail(name: str) -> None:
        slowly(name)
        if name == "save.removal.during":
            raise ValueError("nobody expects this")

    started = time.monotonic()
    with faults.injected(fail), pytest.raises(Exception) as caught:  # noqa: PT011  # the caller compares
        trainer(BACKGROUND, max_epochs=1).fit(module, loader())
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - started, standing()


def test_a_failure_of_one_rank_at_the_end_is_told_to_the_other(ranks: Ranks, tmp_path: Path) -> None:
    for text, seconds, replaced in ranks(2)(fail_in_the_last_removal, str(tmp_path)):
        assert replaced == []
        assert "nobody expects this" in text
        assert seconds < 20
    assert verify(tmp_path / "fitted.ckpt").step == 3


class Terminated(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 1 and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def terminate(folder: str, fails: bool) -> tuple[str, list[str]]:
    saver = ModelCheckpoint(folder, filename="{step}", save_on_exception=True)
    run = trainer(BACKGROUND, enable_checkpointing=True, callbacks=[saver])

    def hook(name: str) -> None:
        slowly(name)
        if fails and name == "save.shard.after" and run.global_rank == 0:
            raise OSError("the disk is gone")

    try:
        with faults.injected(hook):
            run.fit(Terminated(), loader())
    except BaseException as error:
        kept = error if isinstance(error, SIGTERMException) else error.__context__
        assert isinstance(kept, SIGTERMException)
        return f"{type(error).__name__}: {error}", names_in(Path(folder))
    return "finished", []


def test_a_save_that_a_sigterm_began_is_finished(ranks: Ranks, tmp_path: Path) -> None:
    for told, found in ranks(2)(terminate, str(tmp_path), False):
        assert told.startswith("SIGTERMException")
        assert found == ["step=2.ckpt"]
    assert verify(tmp_path / "step=2.ckpt").step == 2


def test_a_save_that_a_sigterm_began_and_that_fails_is_told(ranks: Ranks, tmp_path: Path) -> None:
    for told, _ in ranks(2)(terminate, str(tmp_path), True):
        assert told.startswith("CheckpointWriteError") and "the disk is gone" in told
    assert names_in(tmp_path) == []
