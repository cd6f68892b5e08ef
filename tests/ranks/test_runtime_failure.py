"""A rank that fails in the middle of a step: every rank ends in time and knows the first cause."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.errors import StageFailedError, StageTimeoutError
from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.gradients import average_gradients
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.wire.stage import Values
from tests.faults.cases import after_fault, say_when
from tests.pool import Pool
from tests.ranks.toy import Toy

Ranks = Callable[[int], Pool]
TIMEOUT = timedelta(seconds=2)


class Faulty(Toy):
    """Fails in one action of its second step."""

    def __init__(self, index: int, num_stages: int, num_microbatches: int, fault: str, kind: str) -> None:
        super().__init__(index, num_stages, num_microbatches)
        self.fault = fault
        self.kind = kind
        self.actions = 0

    def maybe_fail(self, kind: str, microbatch: int) -> None:
        self.actions += 1
        if kind != self.kind or microbatch != 2 or self.actions <= 2 * self.num_microbatches:
            return
        say_when()
        if self.fault == "raise":
            raise ValueError("the layer had enough")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            os._exit(0)
        time.sleep(60)

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        self.maybe_fail("F", microbatch)
        return super().forward(microbatch, incoming)

    def backward(self, microbatch: int, gradients: Any) -> list[Tensor | None] | None:
        self.maybe_fail("B", microbatch)
        return super().backward(microbatch, gradients)


def run_faulty(num_ranks: int, culprit: int, fault: str, kind: str, timeout: timedelta = TIMEOUT) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plan = get_schedule("1F1B").plan(num_ranks, 4)
    groups = Groups(plan, step_timeout=timeout, hook_timeout=timeout)
    make = Faulty if groups.rank == culprit else (lambda *args: Toy(*args[:3]))
    executor = Executor({groups.rank: make(groups.rank, num_ranks, 4, fault, kind)}, groups)
    for _ in range(3):
        executor.run(plan, ["s"] * 4)


@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_all_ranks_report_the_exception_of_one(ranks: Ranks, culprit: int, kind: str) -> None:
    outcomes = ranks(3).outcomes(run_faulty, 3, culprit, "raise", kind, timeout=20)
    for outcome in outcomes:
        rank = 2 - outcome.rank
        assert after_fault(outcome, outcomes) < 4
        named, action = f"pipeline rank {culprit} (global rank {2 - culprit})", f"{culprit}{kind}2"
        if rank == culprit:
            assert isinstance(outcome.error, ValueError)
            assert f"{named} in {action} (stage {culprit}, micro-batch 2)" in outcome.report
        else:
            assert isinstance(outcome.error, StageFailedError)
            text = str(outcome.error)
            assert f"because {named} failed in {action}" in text
            assert "ValueError: the layer had enough" in text
            assert "in maybe_fail" in text


def fail_and_stay() -> None:
    try:
        run_faulty(3, 1, "raise", "F", timedelta(seconds=60))
    except ValueError:
        time.sleep(5)  # a callback's on_exception that takes its time
        raise


def test_a_failed_rank_that_lives_on_frees_its_peers_at_once(ranks: Ranks) -> None:
    outcomes = ranks(3).outcomes(fail_and_stay, timeout=20)
    assert isinstance(outcomes[1].error, ValueError)
    for outcome in (outcomes[0], outcomes[2]):
        assert "because pipeline rank 1 (global rank 1) failed in 1F2" in str(outcome.error)
        assert after_fault(outcome, outcomes) < 4


@pytest.mark.parametrize("fault", ["kill", "exit"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_lost_process_is_named(ranks: Ranks, culprit: int, fault: str) -> None:
    outcomes = ranks(3).outcomes(run_faulty, 3, culprit, fault, "F", timeout=20)
    for outcome in outcomes:
        if outcome.rank == 2 - culprit:
            assert outcome.exit_code == (-signal.SIGKILL if fault == "kill" else 0)
        else:
            assert isinstance(outcome.error, StageFailedError), outcome.report
            assert f"because pipeline rank {culprit} (global rank {2 - culprit}) failed" in str(outcome.error)
            assert "Last actions of rank" in str(outcome.error)
            assert after_fault(outcome, outcomes) < 4


def test_losing_the_host_of_the_store_still_names_the_lost_rank(ranks: Ranks) -> None:
    outcomes = ranks(3).outcomes(run_faulty, 3, 2, "kill", "F", timeout=20, group=False, rank0_store=True)
    assert outcomes[0].exit_code == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, StageFailedError), outcome.report
        assert "because pipeline rank 2 (global rank 0) failed" in str(outcome.error)
    assert all(after_fault(outcome, outcomes) < 6 for outcome in outcomes)


def test_a_stage_that_takes_too_long_is_named_by_all_that_wait(ranks: Ranks) -> None:
    outcomes = ranks(3).outcomes(run_faulty, 3, 1, "sleep", "F", timeout=8)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, StageTimeoutError), outcome.report
        text = str(outcome.error)
        assert "because pipeline rank 1 (global rank 1) is stuck" in text
        assert "waited 2 s in" in text
        assert "0F2: waiting since" in text or "0B" in text or "2F2: waiting since" in text
        assert after_fault(outcome, outcomes) < 5
    assert outcomes[0].seconds < outcomes[2].seconds + 1  # it does not wait for the stuck rank to read why
    assert outcomes[1].hung


def disagree(what: str) -> None:
    plan = get_schedule("1F1B").plan(2, 4)
    groups = Groups(plan, step_timeout=TIMEOUT)
    executor = Executor({groups.rank: Toy(groups.rank, 2, 4)}, groups)
    executor.run(plan, ["s"] * 4)
    odd = groups.rank == 0
    say_when()
    if what == "plan":
        executor.run(get_schedule("GPipe" if odd else "1F1B").plan(2, 4), ["s"] * 4)
    elif what == "batch":
        executor.run(plan, [("s", 2 if odd else 3)] * 4)
    elif what == "count":
        executor.run(get_schedule("1F1B").plan(2, 3 if odd else 4), ["s"] * (3 if odd else 4))
    elif what == "order":
        swap_two_messages(executor)
        executor.run(plan, ["s"] * 4)
    else:
        channel = next(iter(executor.channels.values()))
        if odd:
            channel._agreements._known[1, "s"].checksum ^= 1
        executor.run(plan, ["s"] * 4)


def swap_two_messages(executor: Executor) -> None:
    """The sender packs micro-batch 1 as 2 and 2 as 1."""
    channel = next(iter(executor.channels.values()))
    original = channel.send_values
    swapped = {1: 2, 2: 1}

    def send_values(stage: int, microbatch: int, values: Values) -> None:
        original(stage, swapped.get(microbatch, microbatch), values)

    channel.send_values = send_values  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plan", "ConfigMismatchError: rank . runs another plan than this rank"),
        ("batch", "BatchMismatchError: rank . has micro-batches of other shapes or types"),
        ("count", "(ConfigMismatchError: rank . runs another plan|MessageError)"),
        (
            "order",
            "MessageError: rank 0 sent values of micro-batch 2 .* where values of micro-batch 1",
        ),
        ("metadata", "MessageError: rank 0 and this rank have agreed on different metadata"),
    ],
)
def test_ranks_that_disagree_get_the_same_error_and_no_stale_data(
    ranks: Ranks, what: str, message: str
) -> None:
    outcomes = ranks(2).outcomes(disagree, what, timeout=10)
    for outcome in outcomes:
        assert outcome.exit_code is None
        assert not outcome.hung
        with pytest.raises(BaseException, match=message):
            raise_with_type(outcome.error)
        assert after_fault(outcome, outcomes) < 4


def raise_with_type(error: BaseException | None) -> None:
    raise AssertionError(f"{type(error).__name__}: {error}")


def fail_outside_a_step() -> None:
    plan = get_schedule("1F1B").plan(2, 2)
    groups = Groups(plan, step_timeout=TIMEOUT)
    executor = Executor({groups.rank: Toy(groups.rank, 2, 2)}, groups)
    executor.run(plan, ["s"] * 2)
    if groups.rank == 0:
        with executor.failure.watch("the optimizer step"):
            raise KeyError("no state")
    executor.run(plan, ["s"] * 2)


def test_a_failure_between_steps_is_told_too(ranks: Ranks) -> None:
    outcomes = ranks(2).outcomes(fail_outside_a_step, timeout=10)
    assert isinstance(outcomes[1].error, KeyError)
    assert "failed in the optimizer step: KeyError: 'no state'" in str(outcomes[0].error)


def fail_in_one_replica(fault: str) -> None:
    plan = get_schedule("1F1B").plan(2, 4)
    groups = Groups(plan, replicas=2, step_timeout=TIMEOUT)
    fails = groups.replica == 1 and groups.rank == 0
    make = Faulty if fails else (lambda *args: Toy(*args[:3]))
    stage = make(groups.rank, 2, 4, fault, "F")
    executor = Executor({groups.rank: stage}, groups)
    for _ in range(3):
        executor.run(plan, ["s"] * 4)
        with executor.failure.watch("averaging gradients", groups.control):
            average_gradients(stage.layer.parameters(), groups.data_parallel)


def test_a_failure_in_one_replica_ends_the_other(ranks: Ranks) -> None:
    outcomes = ranks(4).outcomes(fail_in_one_replica, "raise", timeout=20)
    assert isinstance(outcomes[3].error, ValueError)
    for outcome in outcomes[:3]:
        assert isinstance(outcome.error, StageFailedError), outcome.report
        assert "because pipeline rank 0 (global rank 3) failed in 0F2" in str(outcome.error)
        assert after_fault(outcome, outcomes) < 4
    assert all("stopped in averaging gradients" in str(outcomes[rank].error) for rank in (0, 2))


def test_a_process_lost_in_one_replica_is_named_in_the_other(ranks: Ranks) -> None:
    outcomes = ranks(4).outcomes(fail_in_one_replica, "kill", timeout=20)
    assert outcomes[3].exit_code == -signal.SIGKILL
    for outcome in outcomes[:3]:
        assert isinstance(outcome.error, StageFailedError), outcome.report
        assert "because pipeline rank 0 (global rank 3) failed" in str(outcome.error)
        assert after_fault(outcome, outcomes) < 4


def recover() -> float:
    plan = get_schedule("1F1B").plan(2, 4)
    with pytest.raises((ValueError, StageFailedError)):
        run_faulty(2, 0, "raise", "F")
    groups = Groups(plan, step_timeout=TIMEOUT)
    Executor({groups.rank: Toy(groups.rank, 2, 4)}, groups).run(plan, ["s"] * 4)
    groups.close()
    total = torch.ones(())
    dist.all_reduce(total)
    return float(total)


def test_new_groups_work_after_a_failure_in_the_same_process(ranks: Ranks) -> None:
    assert ranks(2)(recover) == [2.0, 2.0]
