"""Data that fails on one rank: its worker is killed, or it ends before that of the others."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.faults.cases import SOON, Ranks, after_fault, fit, outcomes_of, say_when
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression


class Stream(IterableDataset[Any]):
    """Has no length, and fewer items on global rank 1."""

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(24 if os.environ["RANK"] == "1" else 32):
            yield tuple(torch.randn(n, generator=generator).double() for n in (FEATURES, TARGETS))
        say_when()


class Streams(Regression):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=8)

    def val_dataloader(self) -> Any:
        return []


def end_early(folder: str) -> None:
    fit(Streams(), folder, 2, max_epochs=1)


def test_data_that_ends_earlier_on_one_rank_is_told_at_once(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(ranks, end_early, str(tmp_path))
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert after_fault(outcome, outcomes) < SOON
        assert "BatchMismatchError: the data of global rank 1 ended after 3 batches" in outcome.output


class KillsItsWorker(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == 40 and os.environ["RANK"] == "1" and torch.utils.data.get_worker_info() is not None:
            say_when()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(index)
        return tuple(torch.randn(n, generator=generator).double() for n in (FEATURES, TARGETS))


class LosesAWorker(Streams):
    def train_dataloader(self) -> Any:
        return DataLoader(KillsItsWorker(), batch_size=8, num_workers=1, multiprocessing_context="fork")


def lose_a_worker(folder: str) -> None:
    fit(LosesAWorker(), folder, 2, max_epochs=1)


def test_a_killed_worker_of_a_loader_is_its_own_ranks_failure(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(ranks, lose_a_worker, str(tmp_path))
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert after_fault(outcome, outcomes) < SOON
        assert "DataLoader worker" in outcome.output
        assert "(global rank 0) failed" not in outcome.output
    assert "(global rank 1) failed" in outcomes[0].output
