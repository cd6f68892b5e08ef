"""SLURM tells a job to end: all ranks save after the same batch, then it is queued again, and goes on there."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor

from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder import faults
from tests.pool import Pool
from tests.ranks.checkpoint_cases import names_in
from tests.ranks.lightning_cases import Regression, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}


class Told(Regression):
    """Rank 1 is told in the middle of the second batch, rank 0 in that of the third."""

    began = -1

    def on_train_start(self) -> None:
        self.began = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.began == 0 and (self.global_rank, self.trainer.global_step) in ((1, 1), (0, 2)):
            os.kill(os.getpid(), signal.SIGUSR1)
        return self.loss(batch)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.validating:
            os.kill(os.getpid(), signal.SIGUSR1)


def slurm(folder: str) -> dict[str, str]:
    """As SLURM sets it; its command notes what it was asked, once the checkpoint is whole."""
    rank, path = os.environ["RANK"], Path(folder, f"bin{os.environ['RANK']}")
    path.mkdir(parents=True, exist_ok=True)
    command = path / "scontrol"
    command.write_text(
        f'#!/bin/sh\ntest -f {folder}/hpc_ckpt_1.ckpt/manifest.json && echo "$@" >> {folder}/requeued\n'
    )
    command.chmod(0o755)
    return {
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0", "SLURM_JOB_ID": "4711", "PATH": f"{path}:{os.environ['PATH']}",
    }  # fmt: skip


def slowly(name: str) -> None:
    if name == "save.shard.before":
        time.sleep(0.2)


def run_as_job(folder: str) -> tuple[int, dict[str, Tensor]]:
    os.makedirs(f"{folder}/runs", exist_ok=True)
    with mock.patch.dict(os.environ, slurm(folder)), faults.injected(slowly):
        run = trainer({**TWO, "async_save": True}, plugins=[SLURMEnvironment()], default_root_dir=folder)
        module = Told()
        run.fit(module, loader())
    return module.began, weights(module)


def resume_by_hand(folder: str) -> int:
    module = Told()
    run = trainer(TWO, default_root_dir=folder)
    run.fit(module, loader(), ckpt_path="hpc")
    return module.began


def validate_as_job(folder: str) -> list[str]:
    with mock.patch.dict(os.environ, slurm(folder)), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = trainer(TWO, plugins=[SLURMEnvironment()], default_root_dir=folder)
        run.validate(Told(), loader(), verbose=False)
    return [str(warning.message) for warning in told]


def test_a_job_that_is_to_end_saves_once_and_goes_on_there(ranks: Ranks, tmp_path: Path) -> None:
    straight, _ = fit(None)
    for began, found in ranks(2)(run_as_job, str(tmp_path), timeout=40):
        assert began == 0
        torch.testing.assert_close(found, straight, rtol=1e-10, atol=0)
    assert [name for name in names_in(tmp_path) if "ckpt" in name] == ["hpc_ckpt_1.ckpt"]
    assert verify(tmp_path / "hpc_ckpt_1.ckpt").step == 2
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    for began, found in ranks(2)(run_as_job, str(tmp_path)):
        assert began == 2
        torch.testing.assert_close(found, straight, rtol=1e-10, atol=0)
    assert ranks(2)(resume_by_hand, str(tmp_path)) == [2, 2]


def test_an_evaluation_that_is_to_end_saves_nothing_and_says_so(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks(2)(validate_as_job, str(tmp_path))
    assert any("SIGUSR1" in text and "nothing is saved" in text for text in first)
    assert [name for name in names_in(tmp_path) if "ckpt" in name] == []
