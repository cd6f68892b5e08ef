"""Saves in the background that are killed or get stuck: the one before stands, and the run is told."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder import faults
from tests.pool import Pool
from tests.ranks.checkpoint_cases import trainer
from tests.ranks.lightning_cases import Regression, loader

Ranks = Callable[[int], Pool]
BACKGROUND = {"stages": 2, "num_microbatches": 1, "async_save": True}


class Slow(Regression):
    """Notes where it began and what its ranks trained while a save was in flight."""

    def __init__(self) -> None:
        super().__init__()
        del self.error
        self.began = -1

    def on_train_start(self) -> None:
        self.began = self.trainer.global_step

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def fit_saving_last(folder: str, hook: Callable[[Any, str], None] | None = None, **options: Any) -> int:
    """A run of 6 steps that replaces `last.ckpt` after every second; gives the step it began at."""
    saver = ModelCheckpoint(folder, filename="last", every_n_train_steps=2, enable_version_counter=False)
    run = trainer(
        {**BACKGROUND, **options}, max_steps=6, max_epochs=-1, enable_checkpointing=True, callbacks=[saver]
    )
    module, path = Slow(), f"{folder}/last.ckpt"
    with faults.injected(lambda name: hook(run, name) if hook else None):
        run.fit(module, loader(16, batch_size=8), ckpt_path=path if os.path.exists(path) else None)
    return module.began


def kill_in_the_second_save(folder: str, point: str, rank: int) -> None:
    seen: list[str] = []

    def hook(run: Any, name: str) -> None:
        seen.append(name)
        if seen.count(point) == (1 if "removal" in point else 2) and run.global_rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    fit_saving_last(folder, hook)


@pytest.mark.parametrize(("point", "rank", "step"), [
    ("save.shard.during", 1, 2), ("save.rename.before", 0, 2), ("save.removal.during", 0, 4),
])  # fmt: skip
def test_a_kill_during_a_save_in_the_background_leaves_the_old_or_the_new(
    ranks: Ranks, tmp_path: Path, point: str, rank: int, step: int
) -> None:
    outcomes = ranks(2).outcomes(kill_in_the_second_save, str(tmp_path), point, rank, timeout=30, dies=True)
    assert outcomes[rank].exit_code == -signal.SIGKILL, outcomes
    assert outcomes[1 - rank].exit_code == 1 and outcomes[1 - rank].seconds < 20
    assert verify(tmp_path / "last.ckpt").step == step
    assert ranks(2)(fit_saving_last, str(tmp_path)) == [step, step]
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert verify(tmp_path / "last.ckpt").step == 6


def get_stuck(folder: str, in_background: bool) -> tuple[str, float]:
    freed = time.monotonic() + 30
    began: list[float] = []
    seen: list[str] = []

    def hook(run: Any, name: str) -> None:
        nonlocal freed
        seen.append(name)
        if name != "save.shard.during" or seen.count("save.shard.before") < 2:
            return  # the first save, however late it is written
        began.append(time.monotonic())
        while run.global_rank == 1 and time.monotonic() < freed and not Path(folder, "told").exists():
            time.sleep(0.01)

    try:
        fit_saving_last(folder, hook, async_save=in_background, checkpoint_timeout=2)
    except Exception as error:
        Path(folder, "told").touch()
        return f"{type(error).__name__}: {error}", time.monotonic() - began[0]
    return "went well", 0.0


@pytest.mark.parametrize("in_background", [False, True], ids=["", "async"])
def test_a_writer_that_hangs_is_named_on_every_rank(
    ranks: Ranks, tmp_path: Path, in_background: bool
) -> None:
    for text, seconds in ranks(2)(get_stuck, str(tmp_path), in_background, timeout=50):
        assert "global rank 1 did not answer, ended or stuck (checkpoint_timeout=2 s" in text
        assert seconds < 10
    (tmp_path / "told").unlink()
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert verify(tmp_path / "last.ckpt").step == 2
