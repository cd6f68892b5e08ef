"""Gradients over replicas and over stages that share a parameter."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.gradients import average_gradients, sum_gradients
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.schedules import get_schedule
from tests.pool import Pool
from tests.ranks.toy import Toy, by_hand

Ranks = Callable[[int], Pool]


def shape_of(replica: int) -> Callable[[int], int]:
    return lambda microbatch: 2 + replica + microbatch


def run_replicas() -> list[Any]:
    plan = get_schedule("1F1B").plan(2, 3)
    groups = Groups(plan, replicas=2)
    toy = Toy(groups.rank, 2, 3, shape=shape_of(groups.replica))
    Executor({groups.rank: toy}, groups).run(plan, [(groups.replica, k) for k in range(3)])
    average_gradients(toy.layer.parameters(), groups.data_parallel)
    groups.close()
    return [groups.global_rank, groups.rank, toy.gradients()]


def test_replicas_take_the_mean_of_their_gradients(ranks: Ranks) -> None:
    alone = [by_hand(2, 3, shape=shape_of(replica)) for replica in range(2)]
    for number, (global_rank, rank, gradients) in enumerate(ranks(4)(run_replicas)):
        assert (global_rank, rank) == (number, 1 - number // 2)
        pair = zip(alone[0][rank].gradients(), alone[1][rank].gradients(), strict=True)
        assert all(map(torch.equal, gradients, [(a + b) / 2 for a, b in pair]))


def average_ragged() -> list[Any]:
    groups = Groups(get_schedule("1F1B").plan(1, 1), replicas=2)
    first = groups.global_rank == 0
    parameters = [
        Parameter(torch.zeros(3)),
        Parameter(torch.zeros(2).half()),
        Parameter(torch.zeros(2, 2)),
        Parameter(torch.zeros(5), requires_grad=False),
        Parameter(torch.zeros(2, 2)),
    ]
    parameters[0].grad = torch.full((3,), 2.0 if first else 4.0)
    if first:
        parameters[1].grad = torch.ones(2).half()
    parameters[4].grad = torch.arange(4.0).reshape(2, 2).t()
    average_gradients(parameters, groups.data_parallel)
    groups.close()
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_a_gradient_that_nobody_has_stays_none_and_one_that_some_have_counts_as_zero(ranks: Ranks) -> None:
    expected = [[3.0, 3.0, 3.0], [0.5, 0.5], None, None, [[0.0, 2.0], [1.0, 3.0]]]
    assert ranks(2)(average_ragged) == [expected, expected]


def average_large() -> list[Any]:
    groups = Groups(get_schedule("1F1B").plan(1, 1), replicas=2)
    parameters = [Parameter(torch.zeros(2)), Parameter(torch.zeros(2).half())]
    parameters[0].grad = torch.tensor([3e38, -3e38])
    parameters[1].grad = torch.tensor([6e4, 1.0]).half()
    average_gradients(parameters, groups.data_parallel)
    groups.close()
    return [p.grad for p in parameters]


def test_the_average_of_finite_gradients_is_finite_though_their_sum_is_not(ranks: Ranks) -> None:
    for found in ranks(2)(average_large):
        assert torch.equal(found[0], torch.tensor([3e38, -3e38]))
        assert torch.equal(found[1], torch.tensor([6e4, 1.0]).half())


def sum_shared() -> list[Any]:
    plan = get_schedule("1F1B").plan(3, 3)
    groups = Groups(plan)
    groups.share([(0, 2), (2, 0), (1,)], plan)
    parameter = Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), float(groups.rank + 1))
    if groups.rank != 1:
        sum_gradients([parameter], groups.shared((0, 2), plan))
    sum_gradients([parameter], groups.shared((1,), plan))
    groups.close()
    return parameter.grad.tolist()


def test_gradients_of_a_shared_parameter_are_summed_over_its_stages(ranks: Ranks) -> None:
    assert ranks(3)(sum_shared) == [[4.0, 4.0], [2.0, 2.0], [4.0, 4.0]]
