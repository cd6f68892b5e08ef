"""SIGTERM reaches one rank in the middle of a step: all ranks end after the same batch, with a checkpoint."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_utilities.core.rank_zero as rank_zero
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]


class TerminatedInStep(Regression):
    def __init__(self, rank: int, batch: int) -> None:
        super().__init__()
        self.rank, self.batch = rank, batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == self.rank and batch_idx == self.batch and self.current_epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.loss(batch)


class Lines(logging.Handler):
    """Keeps what rank 0 tells the user."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def terminated_with_lines(rank: int, folder: str) -> list[str]:
    lines = Lines()
    rank_zero.log.addHandler(lines)
    try:
        terminated(rank, folder)
    finally:
        rank_zero.log.removeHandler(lines)
    return lines.lines


def test_rank_zero_says_how_far_the_run_came(ranks: Ranks, tmp_path: Path) -> None:
    lines, _ = ranks(2)(terminated_with_lines, 1, str(tmp_path))
    assert lines.count("SIGTERM: all ranks end after 2 optimizer steps, in epoch 0") == 1


def terminated(rank: int, folder: str) -> tuple[str, int, dict[str, torch.Tensor]]:
    module = TerminatedInStep(rank, batch=1)
    saver = ModelCheckpoint(folder, save_on_exception=True)
    run = trainer({"stages": 2, "num_microbatches": 2}, enable_checkpointing=True, callbacks=[saver])
    try:
        run.fit(module, loader())
    except SIGTERMException:
        return "terminated", run.global_step, weights(module)
    return "finished", run.global_step, {}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_after_the_same_batch(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    outcomes = ranks(2)(terminated, rank, str(tmp_path))
    assert [(how, step) for how, step, _ in outcomes] == [("terminated", 2), ("terminated", 2)]
    one, _ = fit(None, max_steps=2)
    for _, _, found in outcomes:
        torch.testing.assert_close(found, one, rtol=1e-10, atol=0)


def resumed(folder: str) -> dict[str, torch.Tensor]:
    path = next(Path(folder).iterdir())
    module = Regression()
    trainer({"stages": 2, "num_microbatches": 2}).fit(module, loader(), ckpt_path=str(path))
    return weights(module)


def test_the_checkpoint_of_that_batch_resumes_to_the_same_weights(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(terminated, 1, str(tmp_path))
    straight, _ = fit(None)
    for found in ranks(2)(resumed, str(tmp_path)):
        torch.testing.assert_close(found, straight, rtol=1e-10, atol=0)


class TerminatedInEvaluation(Regression):
    def terminate(self, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, *_: Any) -> None:
        self.terminate(batch_idx)

    def on_test_batch_start(self, batch: Any, batch_idx: int, *_: Any) -> None:
        self.terminate(batch_idx)

    def on_predict_batch_start(self, batch: Any, batch_idx: int, *_: Any) -> None:
        self.terminate(batch_idx)


def evaluated(call: str) -> str:
    pl.seed_everything(1, verbose=False)
    options: dict[str, Any] = {} if call == "predict" else {"verbose": False}
    try:
        getattr(trainer({"stages": 2}), call)(TerminatedInEvaluation(), loader(32), **options)
    except SIGTERMException:
        return "terminated"
    return "finished"


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_an_evaluation_ends_on_every_rank_alike(ranks: Ranks, call: str) -> None:
    outcomes = ranks(2).outcomes(evaluated, call, timeout=30, dies=True)
    assert [outcome.value for outcome in outcomes] == ["terminated", "terminated"]
    assert all(outcome.seconds < 10 for outcome in outcomes)
    assert all("failed in" not in outcome.output for outcome in outcomes)
