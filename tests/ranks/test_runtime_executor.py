"""Plans run over gloo on toy stages: gradients, memory, receives ahead, messages that are not as agreed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.schedules import Plan, get_schedule
from lightning_pipeline.wire.link import Link
from lightning_pipeline.wire.stage import Values
from tests.pool import Pool
from tests.ranks.toy import Toy, by_hand, forwards

Ranks = Callable[[int], Pool]
LOOPED = """
0F0 0F1 2F0 2F1 2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 2B3 0B2 0B3
1F0 1F1 3F0 3B0 3F1 3B1 1B0 1F2 1B1 1F3 3F2 3B2 3F3 3B3 1B2 1B3
"""
V_SHAPED = "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
HALVES = "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
EAGER = "0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5"


def plan_of(text: str, num_ranks: int = 2, num_microbatches: int = 4) -> Plan:
    if text in ("GPipe", "1F1B"):
        return get_schedule(text).plan(num_ranks, num_microbatches)
    return Plan.parse(text)


def ragged(microbatch: int) -> int:
    return 2 + microbatch % 3


def run_toys(text: str, num_ranks: int, num_microbatches: int, steps: int = 3) -> list[Any]:
    """Gradients of this rank's stages after some steps, and the most micro-batches each held."""
    plan = plan_of(text, num_ranks, num_microbatches)
    groups = Groups(plan)
    stages = {
        s: Toy(s, plan.num_stages, plan.num_microbatches, shape=ragged) for s in plan.stages_of(groups.rank)
    }
    executor = Executor(stages, groups)
    for _ in range(steps):
        executor.run(plan, [("train", ragged(k)) for k in range(plan.num_microbatches)])
    groups.close()
    return [(index, toy.gradients(), toy.most_held) for index, toy in stages.items()]


@pytest.mark.parametrize("num_microbatches", [1, 4, 7])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_gradients_equal_one_process_to_the_last_bit(
    ranks: Ranks, schedule: str, num_ranks: int, num_microbatches: int
) -> None:
    reference = by_hand(num_ranks, num_microbatches, shape=ragged, steps=3)
    for stages in ranks(num_ranks)(run_toys, schedule, num_ranks, num_microbatches):
        for index, gradients, held in stages:
            assert all(map(torch.equal, gradients, reference[index].gradients()))
            assert held <= (num_ranks - index if schedule == "1F1B" else num_microbatches)


@pytest.mark.parametrize("text", [LOOPED, V_SHAPED, HALVES, EAGER], ids=["looped", "v", "halves", "eager"])
def test_plans_with_several_stages_per_rank_and_halves_of_backward(ranks: Ranks, text: str) -> None:
    plan = Plan.parse(text)
    reference = by_hand(plan.num_stages, plan.num_microbatches, shape=ragged, steps=3)
    for stages in ranks(2)(run_toys, text, 2, plan.num_microbatches):
        for index, gradients, _ in stages:
            assert all(map(torch.equal, gradients, reference[index].gradients()))


def looped_breadth_first(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> str:
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [f"{s}F{k}" for s in stages for k in range(num_microbatches)]
        backwards = [f"{s}B{k}" for s in reversed(stages) for k in range(num_microbatches)]
        rows.append(" ".join(forwards + backwards))
    return "\n".join(rows)


def test_a_ring_of_ranks_with_two_stages_each(ranks: Ranks) -> None:
    reference = by_hand(6, 5, shape=ragged, steps=3)
    for stages in ranks(3)(run_toys, looped_breadth_first(3, 2, 5), 3, 5):
        assert len(stages) == 2
        for index, gradients, _ in stages:
            assert all(map(torch.equal, gradients, reference[index].gradients()))


def count_receives() -> dict[str, Any]:
    plan = plan_of("1F1B", 3, 8)
    groups = Groups(plan)
    posted: list[int] = []
    for link in groups.links.values():
        watch_posts(link, groups, posted)
    executor = Executor({groups.rank: Toy(groups.rank, 3, 8)}, groups)
    for _ in range(2):
        executor.run(plan, ["s"] * 8)
    groups.close()
    return {"most": max(posted), "links": len(executor.channels)}


def watch_posts(link: Link, groups: Groups, posted: list[int]) -> None:
    original = link.post

    def post(num_bytes: int, *, pinned: bool = False) -> None:
        original(num_bytes, pinned=pinned)
        posted.append(sum(not other.is_free for other in groups.links.values()))

    link.post = post  # type: ignore[method-assign]


def test_one_receive_is_posted_ahead_per_neighbour(ranks: Ranks) -> None:
    assert ranks(3)(count_receives) == [{"most": n, "links": n} for n in (1, 2, 1)]


class Echo:
    """Sends what it is told and returns what it got, for messages that are not as agreed."""

    def __init__(self, index: int, sent: Callable[[int, int], Values]) -> None:
        self.index = index
        self.sent = sent
        self.step = 0
        self.seen: list[Any] = []

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        if incoming is None:
            return self.sent(self.step, microbatch)
        self.seen.append(incoming)
        return None

    def backward(self, microbatch: int, gradients: Any) -> Any:
        if self.index == 0:
            self.seen.append(gradients)
            return None
        values = self.seen[-1]
        return [t * 2 if t.requires_grad and microbatch % 2 == 0 else None for t in values.tensors]


def changing(step: int, microbatch: int) -> Values:
    """Other shape, dtype, stride, number, table or flag although the signature stays."""
    base = torch.arange(24.0).reshape(2, 3, 4) + microbatch
    return [
        Values([base.requires_grad_()], "a"),
        Values([base.requires_grad_()], "a"),
        Values([base.double().requires_grad_(), torch.arange(5)], "a"),
        Values([base.permute(2, 0, 1).requires_grad_()], "x" * 9000),
        Values([base[:, 1:, ::2].requires_grad_()], "b"),
        Values([base], "b"),
        Values([], "b"),
        Values([base.bfloat16().requires_grad_(), torch.tensor(True), torch.zeros(0, 3)], "c"),
        Values([base.to(memory_format=torch.contiguous_format).expand(5, 2, 3, 4).requires_grad_()], "d"),
    ][(step + microbatch) % 9]


def run_echo() -> list[tuple[Any, ...]]:
    plan = Plan.parse("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    groups = Groups(plan)
    stage = Echo(groups.rank, changing)
    executor = Executor({groups.rank: stage}, groups)  # type: ignore[dict-item]
    for stage.step in range(9):
        executor.run(plan, ["same"] * 3)
    groups.close()
    if groups.rank == 0:
        return stage.seen
    return [
        (
            [t.detach() for t in v.tensors],
            [t.stride() for t in v.tensors],
            v.table,
            [t.requires_grad for t in v.tensors],
            [t.is_leaf for t in v.tensors],
        )
        for v in stage.seen
    ]


def test_values_that_are_not_as_agreed_arrive_as_they_were_sent(ranks: Ranks) -> None:
    received, gradients = ranks(2)(run_echo)  # global rank 0 holds the last stage
    sent = [changing(step, microbatch) for step in range(9) for microbatch in range(3)]
    for index, (values, (tensors, strides, table, flags, leaves)) in enumerate(
        zip(sent, received, strict=True)
    ):
        assert table == values.table
        assert all(leaves)
        assert flags == [t.requires_grad for t in values.tensors]
        for tensor, stride, original in zip(tensors, strides, values.tensors, strict=True):
            assert torch.equal(tensor, original)
            assert tensor.dtype == original.dtype
            dense = torch.empty_like(original)
            assert stride == dense.stride()
        for gradient, original in zip(gradients[index], values.tensors, strict=True):
            if original.requires_grad and index % 3 % 2 == 0:
                assert torch.equal(gradient, original * 2)
            else:
                assert gradient is None


def sometimes_empty(step: int, microbatch: int) -> Values:
    if (step + microbatch) % 3 == 0:
        return Values([], empty=True)
    return Values([torch.full((2,), float(microbatch)).requires_grad_()], "t")


def run_empty(forward_only: bool) -> tuple[int, list[bool]]:
    plan = plan_of("1F1B", 2, 4)
    groups = Groups(plan)
    stage = Echo(groups.rank, sometimes_empty)
    executor = Executor({groups.rank: stage}, groups)  # type: ignore[dict-item]
    for stage.step in range(4):
        executor.run(forwards(plan) if forward_only else plan, ["same"] * 4)
    groups.close()
    return groups.rank, [v.empty for v in stage.seen if isinstance(v, Values)] or [len(stage.seen) == 10]


@pytest.mark.parametrize("forward_only", [False, True])
def test_nothing_follows_an_empty_microbatch_and_nothing_comes_back(ranks: Ranks, forward_only: bool) -> None:
    (_, empty), (_, gradients) = ranks(2)(run_empty, forward_only)
    assert empty == [(step + microbatch) % 3 == 0 for step in range(4) for microbatch in range(4)]
    assert gradients == [not forward_only]


def evaluate_under_changing_modes(text: str) -> list[float]:
    plan = plan_of(text, 2, 2)
    groups = Groups(plan)
    stages = {index: Toy(index, plan.num_stages, 2) for index in plan.stages_of(groups.rank)}
    executor = Executor(stages, groups)
    losses: list[Tensor] = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            trains = mode is torch.enable_grad
            executor.run(plan if trains else forwards(plan), [trains] * 2)
        losses += [loss for stage in stages.values() for loss in stage.losses.values()]
    groups.close()
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("text", ["1F1B", V_SHAPED])
def test_training_and_evaluation_alternate(ranks: Ranks, text: str) -> None:
    losses = ranks(2)(evaluate_under_changing_modes, text)[0]
    reference = by_hand(plan_of(text, 2, 2).num_stages, 2)
    assert losses == [float(loss) for loss in reference[-1].losses.values()] * 4


def use_twice_then_default_group() -> float:
    for schedule in ("GPipe", "1F1B"):
        plan = plan_of(schedule, 2, 3)
        groups = Groups(plan)
        Executor({groups.rank: Toy(groups.rank, 2, 3)}, groups).run(plan, ["s"] * 3)
        groups.close()
    total = torch.ones(())
    dist.all_reduce(total)
    return float(total)


def test_executors_follow_one_another_and_leave_the_default_group_usable(ranks: Ranks) -> None:
    assert ranks(2)(use_twice_then_default_group) == [2.0, 2.0]


class Gate(Toy):
    """A toy whose step ends on it for odd micro-batches."""

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        if incoming is not None and incoming.empty:
            return None if self.last else Values([], empty=True)
        values = super().forward(microbatch, incoming)
        return Values([], empty=True) if self.index == 1 and microbatch % 2 else values


def run_gate() -> tuple[bool, list[int]]:
    plan = plan_of("1F1B", 3, 4)
    groups = Groups(plan)
    stage = Gate(groups.rank, 3, 4)
    executor = Executor({groups.rank: stage}, groups)
    for _ in range(2):
        executor.run(plan, ["s"] * 4)
    groups.close()
    return all(g is not None for g in stage.gradients()), sorted(stage.losses)


def test_a_step_that_ends_on_a_middle_stage_gives_no_gradient_and_no_hang(ranks: Ranks) -> None:
    assert ranks(3)(run_gate) == [(True, [0, 2]), (True, []), (True, [])]
