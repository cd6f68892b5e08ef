"""Lightning's ways to ask for checkpoints, each in a run over stages."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

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
