"""A rank that fails while tensors are on their way between devices: all end in time, with the first cause."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_pipeline.errors import StageFailedError, StageTimeoutError
from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.schedules import get_schedule
from tests import island, shared_island, streams
from tests.faults.cases import after_fault, say_when
from tests.pool import Pool
from tests.ranks import serial_backend
from tests.ranks.toy import Toy

pytestmark = pytest.mark.quiet  # bounds of 4 seconds

Ranks = Callable[[int], Pool]
STEP_TIMEOUT = 2.0


class Faulty(Toy):
    """Fails at the second micro-batch of its second step."""

    kind, fault, seen = "", "", 0

    def maybe_fail(self, kind: str, microbatch: int) -> None:
        if kind != self.kind or microbatch != 1:
            return
        self.seen += 1
        if self.seen < 2:
            return
        say_when()
        if self.fault == "raise":
            raise ValueError("the layer had enough")
        os.kill(os.getpid(), signal.SIGKILL if self.fault == "kill" else signal.SIGSTOP)

    def forward(self, microbatch: int, incoming: Any) -> Any:
        self.maybe_fail("F", microbatch)
        return super().forward(microbatch, incoming)

    def backward(self, microbatch: int, gradients: Any) -> Any:
        self.maybe_fail("B", microbatch)
        return super().backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Any) -> Any:
        self.maybe_fail("I", microbatch)
        return super().backward_input(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self.maybe_fail("W", microbatch)
        super().backward_weight(microbatch)


def late_groups(plan: Any, way: str) -> Groups:
    island.register()
    island.work_late(1 if way == "serial" else 0)
    shared_island.register()
    return Groups(
        plan, edge_backend=serial_backend.NAME if way == "serial" else None,
        copies="only" if way == "ipc" else "never", device=torch.device(island.NAME, 0),
        step_timeout=timedelta(seconds=STEP_TIMEOUT), hook_timeout=timedelta(seconds=60),
    )  # fmt: skip


def run_faulty(kind: str, fault: str, culprit: int, way: str) -> None:
    plan = get_schedule("ZBH1" if kind in "IW" else "1F1B").plan(2, 4)
    groups = late_groups(plan, way)
    stage = Faulty(groups.rank, 2, 4, device=island.NAME)
    stage.kind, stage.fault = (kind, fault) if groups.rank == culprit else ("", "")
    executor = Executor({groups.rank: stage}, groups, device=torch.device(island.NAME, 0))
    for _ in range(3):
        executor.run(plan, ["s"] * 4)


@pytest.mark.parametrize(
    ("fault", "kind"), [(f, k) for f in ("raise", "kill") for k in "FBIW"] + [("stop", "F"), ("stop", "W")]
)
def test_every_rank_knows_the_first_cause_in_time(apart: Ranks, fault: str, kind: str) -> None:
    way = "ipc" if kind in "BW" else "serial"
    culprit = int(kind in "BI")
    dead = 1 - culprit  # numbers go down along the pipeline
    outcomes = apart(2).outcomes(
        run_faulty, kind, fault, culprit, way, timeout=20, without=[dead] if fault == "stop" else []
    )
    other = outcomes[1 - dead]
    assert isinstance(other.error, StageFailedError), other.report
    assert f"because pipeline rank {culprit} (global rank {dead})" in str(other.error)
    assert after_fault(other, outcomes) < STEP_TIMEOUT + 2
    if fault == "raise":
        assert isinstance(outcomes[dead].error, ValueError)
        assert f"{culprit}{kind}1" in str(other.error)
        assert after_fault(outcomes[dead], outcomes) < STEP_TIMEOUT + 2


def wait_for_each_other() -> None:
    plan = get_schedule("1F1B").plan(2, 4)
    groups = late_groups(plan, "serial")
    stage = Toy(groups.rank, 2, 4, device=island.NAME)
    executor = Executor({groups.rank: stage}, groups, device=torch.device(island.NAME, 0))
    executor._in_order = False  # the order of a pipeline over gloo, which one queue of operations deadlocks
    say_when()
    for _ in range(3):
        executor.run(plan, ["s"] * 4)


def test_two_ranks_that_wait_for_each_other_are_both_named(apart: Ranks) -> None:
    for outcome in apart(2).outcomes(wait_for_each_other, timeout=20):
        assert isinstance(outcome.error, StageTimeoutError), outcome.report
        assert "the ranks wait for each other" in str(outcome.error)
        assert "rank 0 (global rank 1) in" in str(outcome.error)
        assert "rank 1 (global rank 0) in" in str(outcome.error)


def wait_for_a_device_that_spins() -> None:
    """Rank 1's host hands out a step that its device never begins, and is killed; rank 0 waits for its own."""
    plan = get_schedule("1F1B").plan(2, 4)
    groups = late_groups(plan, "serial")
    stage = Toy(groups.rank, 2, 4, device=island.NAME)
    executor = Executor({groups.rank: stage}, groups, device=torch.device(island.NAME, 0))
    executor.run(plan, ["s"] * 4)
    if groups.rank == 1:
        for edge in groups.edges.values():
            edge.settle()
        streams.Queue.gate.clear()
    executor.run(plan, ["s"] * 4)
    if groups.rank == 1:
        say_when()
        os.kill(os.getpid(), signal.SIGKILL)
    streams.current().synchronize()
    executor.run(plan, ["s"] * 4)


def test_a_host_that_waits_for_a_device_that_spins_for_a_lost_rank_is_freed(apart: Ranks) -> None:
    outcomes = apart(2).outcomes(wait_for_a_device_that_spins, timeout=30)
    assert isinstance(outcomes[1].error, StageFailedError), outcomes[1].report
    assert "because pipeline rank 1 (global rank 0)" in str(outcomes[1].error)
    assert after_fault(outcomes[1], outcomes) < STEP_TIMEOUT + 2
