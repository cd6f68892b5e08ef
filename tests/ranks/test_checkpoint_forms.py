"""Lightning's ways to ask for checkpoints, each in a run over stages."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_pipeline import faults
from lightning_pipeline.checkpoint.consolidate import verify
from tests.pool import Pool
from tests.ranks.checkpoint_cases import names_in
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}


def fit_with_exception_checkpoint(folder: str) -> tuple[str, list[str]]:
    path = Path(folder) / "on_exception.ckpt"
    run = trainer(TWO, max_epochs=1, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    run.fit(Regression(), loader())
    run.save_checkpoint(path)
    there = path.exists()
    run.strategy.barrier()
    run.strategy.remove_checkpoint(path)
    run.strategy.barrier()
    return run.state.status.value, [str(there), str(path.exists())]


def test_a_run_that_went_well_removes_its_exception_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    for status, found in ranks(2)(fit_with_exception_checkpoint, str(tmp_path)):
        assert status == "finished"
        assert found == ["True", "False"]


class Asked(ModelCheckpoint):
    """Counts how often a name was looked up."""

    asked = 0

    def file_exists(self, filepath: Any, trainer: pl.Trainer) -> bool:
        found = super().file_exists(filepath, trainer)
        self.asked += "last" not in str(filepath)
        return found


def fit_versions(folder: str, in_background: bool, options: dict[str, Any]) -> tuple[str, str]:
    """A save stays in flight until the name of the next one has been looked up."""
    saver = Asked(folder, filename="{epoch}", every_n_train_steps=2, save_on_train_epoch_end=False, **options)
    run = trainer(
        {**TWO, "async_save": in_background}, max_epochs=1, enable_checkpointing=True, callbacks=[saver]
    )

    def hook(name: str) -> None:
        asked, deadline = saver.asked, time.monotonic() + 10
        while (
            in_background and name == "save.shard.before" and saver.asked == asked
            and run.global_step < 6 and time.monotonic() < deadline
        ):  # fmt: skip
            time.sleep(0.005)

    with faults.injected(hook):
        run.fit(Regression(), loader(48))
    return Path(saver.best_model_path).name, Path(saver.last_model_path).name


@pytest.mark.parametrize(("options", "names", "steps"), [
    ({"monitor": "train_loss_step", "save_top_k": -1},
     ["epoch=0-v1.ckpt", "epoch=0-v2.ckpt", "epoch=0.ckpt"], {2, 4, 6}),
    ({"save_last": "link"}, ["epoch=0.ckpt", "last.ckpt"], {6}),
], ids=str)  # fmt: skip
def test_names_are_counted_up_while_a_save_is_in_flight(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any], names: list[str], steps: set[int]
) -> None:
    chosen = [
        (ranks(2)(fit_versions, str(tmp_path / str(kind)), kind, options), names_in(tmp_path / str(kind)))
        for kind in (False, True)
    ]
    (first, second), found = chosen[0]
    assert first == second and found == names
    assert chosen[1] == chosen[0]
    assert {verify(path).step for path in (tmp_path / "True").iterdir()} == steps
