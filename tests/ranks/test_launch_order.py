"""Every schedule on toy stages: over gloo, and where a device promises as little as NCCL does."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_pipeline.errors import StageFailedError
from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.settings import Settings
from tests import streams
from tests.pool import Pool
from tests.ranks import serial_backend
from tests.ranks.lightning_cases import assert_same, fit
from tests.ranks.toy import Toy, by_hand, forwards

Ranks = Callable[[int], Pool]
ALL = [
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBH1", "ZBH2", "InterleavedZeroBubble",
    "ZBV", "VHalf", "VMin", "DualPipeV",
]  # fmt: skip


def ragged(microbatch: int) -> int:
    return 2 + microbatch % 3


def groups_of(plan: Any, lanes: int | None, step_timeout: float = 20.0) -> Groups:
    if lanes is None:
        return Groups(plan)
    os.environ["LANES"] = str(lanes)
    serial_backend.register()
    streams.forget()
    return Groups(plan, edge_backend=serial_backend.NAME, step_timeout=timedelta(seconds=step_timeout))


def run_toys(name: str, num_ranks: int, num_microbatches: int, lanes: int | None) -> list[Any]:
    plan = get_schedule(name).plan(num_ranks, num_microbatches)
    groups = groups_of(plan, lanes)
    stages = {
        s: Toy(s, plan.num_stages, plan.num_microbatches, shape=ragged) for s in plan.stages_of(groups.rank)
    }
    executor = Executor(stages, groups)
    for _ in range(2):  # metadata travels in the first step only
        executor.run(plan, [("train", ragged(k)) for k in range(plan.num_microbatches)])
    assert all(edge.bytes_sent > 0 or edge.bytes_received > 0 for edge in groups.edges.values())
    groups.close()
    return [(index, toy.gradients()) for index, toy in stages.items()]


CASES: list[tuple[str, int, int | None]]
CASES = [(name, num_ranks, lanes) for name in ALL for num_ranks in (2, 4) for lanes in (None, 1)]
# Several queues promise more than one does: a few cases of them are enough.
CASES += [(name, n, lanes) for name, n in (("ZBV", 2), ("1F1B", 4), ("DualPipeV", 4)) for lanes in (2, 0)]


@pytest.mark.parametrize(("name", "num_ranks", "lanes"), CASES)
def test_every_schedule_has_the_gradients_of_one_process(
    ranks: Ranks, name: str, num_ranks: int, lanes: int | None
) -> None:
    number = 2 * num_ranks
    plan = get_schedule(name).plan(num_ranks, number)
    reference = by_hand(plan.num_stages, number, shape=ragged, steps=2)
    for stages in ranks(num_ranks)(run_toys, name, num_ranks, number, lanes):
        for index, gradients in stages:
            assert all(map(torch.equal, gradients, reference[index].gradients()))


def run_forwards(lanes: int) -> int:
    plan = get_schedule("1F1B").plan(2, 4)
    groups = groups_of(plan, lanes)
    stages = {groups.rank: Toy(groups.rank, 2, 4, shape=ragged)}
    executor = Executor(stages, groups)
    with torch.no_grad():
        executor.run(forwards(plan), [("eval", ragged(k)) for k in range(4)])
    groups.close()
    return len(stages[groups.rank].losses)


def test_forwards_alone_have_an_order_too(ranks: Ranks) -> None:
    assert sorted(ranks(2)(run_forwards, 1)) == [0, 4]


class Breaks(Toy):
    def backward(self, microbatch: int, gradients: Any) -> Any:
        if microbatch == 1 and self.last:
            raise ValueError("boom")
        return super().backward(microbatch, gradients)


def run_broken() -> str:
    plan = get_schedule("1F1B").plan(2, 4)
    groups = groups_of(plan, 1, step_timeout=4.0)
    executor = Executor({groups.rank: Breaks(groups.rank, 2, 4, shape=ragged)}, groups)
    try:
        executor.run(plan, [("train", ragged(k)) for k in range(4)])
    except (StageFailedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_failure_with_tensors_in_flight_has_one_cause(ranks: Ranks) -> None:
    last, first = (outcome.value for outcome in ranks(2).outcomes(run_broken, timeout=20))
    assert last == "ValueError: boom"
    assert first is not None
    assert "1B1" in first
    assert "boom" in first


def fit_serially(pipeline: dict[str, Any]) -> Any:
    os.environ["LANES"] = "1"
    serial_backend.register()
    streams.forget()
    with pytest.MonkeyPatch.context() as patch:  # as if "nccl" named the serial backend
        patch.setattr(Settings, "edge_backend", lambda *_: serial_backend.NAME)
        return fit({**pipeline, "transport": "nccl"})


@pytest.mark.parametrize(
    "pipeline",
    [
        {"stages": 2, "num_microbatches": 4},
        {"stages": 2, "num_microbatches": 3, "schedule": "ZBV"},
        {"stages": 2, "num_microbatches": 2, "schedule": "ZBH1", "data_parallel_size": 2},
        {"stages": 4, "num_microbatches": 4, "schedule": "GPipe"},
    ],
    ids=lambda p: f"{p.get('schedule', '1F1B')} {p['stages']}x{p.get('data_parallel_size', 1)}",
)
def test_a_fit_with_ragged_batches_and_validation_equals_the_one_over_gloo(
    ranks: Ranks, pipeline: dict[str, Any]
) -> None:
    size = pipeline["stages"] * pipeline.get("data_parallel_size", 1)
    expected = [fit(None)] * size
    if size > pipeline["stages"]:  # a replica logs its own losses
        expected = ranks(size)(fit, pipeline, group=False)
    for found, one in zip(ranks(size)(fit_serially, pipeline, group=False), expected, strict=True):
        assert_same(found, one)
