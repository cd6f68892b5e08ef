"""Lightning's ways to ask for checkpoints, each in a run over stages."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder import faults
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
        asked, deadline = saver.asked, time.monotonic() + 3
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


def fit_form(pipeline: dict[str, Any] | None, folder: str, options: dict[str, Any], times: int) -> list[int]:
    steps = []
    for _ in range(times):
        saver = ModelCheckpoint(folder, **options)
        run = trainer(pipeline, max_epochs=4, enable_checkpointing=True, callbacks=[saver])
        run.fit(Regression(), loader(16), loader(8, seed=4))
        steps.append(run.global_step)
    return steps


@pytest.mark.parametrize(("options", "times", "found"), [
    ({"filename": "{step}", "train_time_interval": timedelta(0), "save_top_k": -1}, 1,
     {f"step={step}.ckpt": step for step in range(1, 9)}),
    ({"filename": "{epoch}", "every_n_epochs": 2, "save_top_k": -1}, 1, {"epoch=1.ckpt": 4, "epoch=3.ckpt": 8}),
    ({"filename": "{epoch}-{val_max:.0f}", "monitor": "val_loss", "mode": "min", "save_top_k": 1,
      "save_on_train_epoch_end": False, "save_last": True}, 1, {"epoch=1-val_max=1.ckpt": 4, "last.ckpt": 4}),
    ({"filename": "same"}, 2, {"same.ckpt": 8, "same-v1.ckpt": 8}),
    ({"filename": "same", "enable_version_counter": False, "save_weights_only": True}, 2, {"same.ckpt": 8}),
], ids=["time", "every second epoch", "at the end of validation", "versions", "no versions"])  # fmt: skip
def test_model_checkpoint_saves_when_it_should(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any], times: int, found: dict[str, int]
) -> None:
    folder, one = tmp_path / "pipeline", tmp_path / "one device"
    assert ranks(2)(fit_form, TWO, str(folder), options, times) == [[8] * times] * 2
    assert {path.name: verify(path).step for path in folder.iterdir()} == found
    fit_form(None, str(one), options, times)
    assert names_in(folder) == names_in(one)


def fit_and_go_back_to_the_best(folder: str) -> tuple[float, list[float], int]:
    """The rate is far too high: the first epoch is the best."""
    saver = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    run = trainer(TWO, max_epochs=3, enable_checkpointing=True, callbacks=[saver])
    module, data = Regression(lr=2.0), loader(8, seed=4)
    run.fit(module, loader(16), data)
    best = float(saver.best_model_score)
    losses = [run.validate(module, data, verbose=False)[0]["val_loss"]]
    losses.append(run.validate(module, data, ckpt_path="best", verbose=False)[0]["val_loss"])
    return best, losses, verify(Path(saver.best_model_path)).epoch


def test_the_best_checkpoint_is_found_by_its_name(ranks: Ranks, tmp_path: Path) -> None:
    for best, (last, again), epoch in ranks(2)(fit_and_go_back_to_the_best, str(tmp_path)):
        assert epoch < 2 and last > best
        assert again == pytest.approx(best, rel=1e-6)  # logged in float32
