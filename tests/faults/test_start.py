"""A rank that does not come to the start of a run, or is lost while torch makes the default group, is named."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_pipeline import PipelineStrategy
from tests.faults.cases import FAULTS, SOON, Ranks, after_fault, say_when, whole
from tests.pool import Outcome
from tests.ranks.lightning_cases import Regression, loader

pytestmark = pytest.mark.quiet  # bounds of 3 to 5 seconds

OWN_GROUPS, MESH = 3, 4
INIT, SILENT = 3.0, 2.0  # init_timeout and step_timeout


class Lost(TorchElasticEnvironment):
    """Meets its fault where the store is asked for first, to come to it, or again, to make torch's group.

    Or, where that is there, before it makes the package's own; or, with these, before the device mesh.
    """

    def __init__(self, fault: str, at: int, strategy: PipelineStrategy) -> None:
        self.fault, self.at, self.asked, self.strategy = fault, at, 0, strategy
        super().__init__()

    @property
    def main_port(self) -> int:
        self.asked += 1
        if self.asked == self.at:
            self.meet()
        return super().main_port

    def local_rank(self) -> int:
        if self.at == OWN_GROUPS and dist.is_initialized():
            self.meet()
        if self.at == MESH and self.strategy._pipeline is not None:
            self.meet()
        return super().local_rank()

    def meet(self) -> None:
        say_when()
        FAULTS[self.fault]()


def started(fault: str, at: int, rank: int, folder: str, stages: int, replicas: int) -> None:
    strategy = PipelineStrategy(
        stages, data_parallel_size=replicas, num_microbatches=3, init_timeout=INIT, step_timeout=SILENT
    )
    hit = os.environ["RANK"] == str(rank)
    environment = Lost(fault, at, strategy) if hit else TorchElasticEnvironment()
    trainer = Trainer(
        accelerator="cpu", devices=stages * replicas, strategy=strategy, plugins=[environment], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, max_epochs=1, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Regression(), loader())


def named(outcomes: list[Outcome], rank: int, bound: float) -> None:
    for outcome in outcomes:
        if outcome.rank != rank:
            assert outcome.exit_code == 1, outcome
            assert after_fault(outcome, outcomes) < bound, outcome
            assert f"global rank {rank}" in outcome.output.split("could not start:")[-1], outcome.output
            assert "StageTimeoutError" in outcome.output or "is gone" in outcome.output


def outcomes(
    ranks: Ranks, folder: Path, fault: str, at: int, rank: int, stages: int = 3, replicas: int = 1
) -> list[Outcome]:
    return ranks(stages * replicas).outcomes(
        started, fault, at, rank, str(folder), stages, replicas, timeout=20, group=False, rank0_store=True,
        dies=True, without=[rank],
    )  # fmt: skip


@pytest.mark.parametrize(("fault", "rank"), [whole("kill", 0), ("kill", 1), whole("stop", 2)])
def test_a_rank_that_never_comes_is_named_after_init_timeout(
    ranks: Ranks, tmp_path: Path, fault: str, rank: int
) -> None:
    named(outcomes(ranks, tmp_path, fault, 1, rank), rank, INIT + 2)


@pytest.mark.parametrize(("fault", "rank"), [whole("kill", 1), ("kill", 0), ("stop", 0), whole("stop", 2)])
def test_a_rank_that_is_lost_while_torch_makes_the_group_is_named(
    ranks: Ranks, tmp_path: Path, fault: str, rank: int
) -> None:
    named(outcomes(ranks, tmp_path, fault, 2, rank), rank, SILENT + 2)


@pytest.mark.parametrize(("fault", "rank"), [("kill", 1), whole("stop", 0)])
def test_a_rank_that_is_lost_while_more_groups_are_made_is_named(
    ranks: Ranks, tmp_path: Path, fault: str, rank: int
) -> None:
    found = outcomes(ranks, tmp_path, fault, OWN_GROUPS, rank)
    named(found, rank, SILENT + 2)
    assert "in making groups" in found[2].output


def test_a_rank_that_is_killed_before_the_device_mesh_is_named(ranks: Ranks, tmp_path: Path) -> None:
    found = outcomes(ranks, tmp_path, "kill", MESH, 1, stages=2, replicas=2)
    for outcome in (one for one in found if one.rank != 1):
        assert outcome.exit_code == 1, outcome
        assert after_fault(outcome, found) < SILENT + 2, outcome
        assert "global rank 1" in outcome.output, outcome.output
        # a slower rank is still told of it by who watches over the making of the groups before
        assert "making the device mesh" in outcome.output or "in making groups" in outcome.output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_there_is_told_by_all(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    for outcome in (found := outcomes(ranks, tmp_path, "fail", 2, rank)):
        assert outcome.exit_code == 1, outcome
        assert after_fault(outcome, found) < SOON
        assert "boom-17" in outcome.output
