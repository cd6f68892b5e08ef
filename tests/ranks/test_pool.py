"""The pool of ranks itself: what it gives a test, and what it tells of a rank that fails."""

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.pool import Pool, RankFailure

Ranks = Callable[[int], Pool]


def add_ranks(start: int) -> tuple[int, int, int]:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return os.getpid(), int(total), torch.get_num_threads()


def test_ranks_share_a_group_and_outlive_a_test(ranks: Ranks) -> None:
    first, second = ranks(2)(add_ranks, 10), ranks(2)(add_ranks, 20)
    assert [(total, threads) for _, total, threads in first] == [(21, 1), (21, 1)]
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]


def fit_plain() -> tuple[str, int, int]:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(BoringModel())
    return type(trainer.strategy.cluster_environment).__name__, trainer.world_size, trainer.global_rank


@pytest.mark.parametrize(("group", "rank0_store"), [(True, False), (False, False), (False, True)])
def test_a_trainer_fits_as_under_torchrun(ranks: Ranks, group: bool, rank0_store: bool) -> None:
    results = ranks(2)(fit_plain, group=group, rank0_store=rank0_store)
    assert results == [("TorchElasticEnvironment", 2, rank) for rank in range(2)]


def rank_one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one had enough")
    time.sleep(60)


def test_the_rank_that_raised_is_told_first(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pool.GRACE", 0.2)
    with pytest.raises(RankFailure, match=r"(?s)rank 1 first\n--- rank 1.*rank one had enough.*--- rank 0"):
        ranks(2)(rank_one_raises)
    assert ranks(2)(add_ranks, 0)[0][1] == 1


def both_wait() -> None:
    dist.recv(torch.empty(1), 1 - dist.get_rank())


def test_a_hanging_rank_is_shown_with_its_stack(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 first.*still running.*in both_wait") as failure:
        ranks(2)(both_wait, timeout=0.5)
    assert [outcome.hung for outcome in failure.value.outcomes] == [True, True]


def die_in_two_ways() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)


def test_exit_codes_of_dying_ranks_are_returned(ranks: Ranks) -> None:
    outcomes = ranks(2).outcomes(die_in_two_ways, timeout=20)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL, 3]


def one_raises_one_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.recv(torch.empty(1), 1)


def test_a_rank_that_dies_of_its_exception_frees_its_peer(ranks: Ranks) -> None:
    outcomes = ranks(2).outcomes(one_raises_one_waits, timeout=20, dies=True)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "the cause" in outcomes[1].output
