"""Global rank numbers and neighbours."""

import pytest

from lightning_pipeline.ranks.groups import neighbours
from lightning_pipeline.ranks.mesh import Numbering
from lightning_pipeline.schedules import Plan, get_schedule

V_SHAPED = Plan.parse("0F0 5F0\n1F0 4F0\n2F0 3F0")
LOOPED = Plan.parse("0F0 3F0\n1F0 4F0\n2F0 5F0")


@pytest.mark.parametrize(("num_ranks", "replicas"), [(1, 1), (3, 2), (2, 2)])
def test_with_one_stage_per_rank_the_design_s_formula_holds(num_ranks: int, replicas: int) -> None:
    plan = get_schedule("1F1B").plan(num_ranks, 4)
    numbering = Numbering.of(plan, replicas=replicas)
    for stage in range(num_ranks):
        for replica in range(replicas):
            number = (num_ranks - 1 - stage) * replicas + replica
            assert numbering.global_rank(stage, replica) == number
            assert numbering.coordinates(number) == (stage, replica)
    assert numbering.world_size == num_ranks * replicas


@pytest.mark.parametrize("plan", [V_SHAPED, LOOPED])
def test_global_rank_0_holds_the_last_stage_of_replica_0(plan: Plan) -> None:
    numbering = Numbering.of(plan, replicas=2)
    assert numbering.global_rank(plan.rank_of(plan.num_stages - 1)) == 0
    everyone = sorted(rank for pipeline in numbering.pipelines() for rank in pipeline)
    assert everyone == sorted(rank for ranks in numbering.replicated() for rank in ranks) == list(range(6))


def test_neighbours_are_pairs_of_ranks_with_neighbouring_stages() -> None:
    assert neighbours(get_schedule("1F1B").plan(3, 3)) == [(0, 1), (1, 2)]
    assert neighbours(V_SHAPED) == [(0, 1), (1, 2)]
    assert neighbours(LOOPED) == [(0, 1), (0, 2), (1, 2)]
    assert neighbours(Plan.parse("0F0 1F0")) == []
