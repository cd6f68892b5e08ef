import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipeline.errors import ConfigurationError, ScheduleError
from lightning_pipeline.schedules import (
    Auto,
    Costs,
    Plan,
    Schedule,
    available_schedules,
    check,
    get_schedule,
    simulate,
)
from tests.calls import calls_of

ROW_15 = Costs(18.522, 18.086, 9.337, send=0.601)
ROW_62 = Costs(29.718, 29.444, 19.927, send=0.527)
LOOPS = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


def planned(costs: Costs, p: int, m: int, **options) -> tuple[Plan, float]:
    plan = Auto(costs=costs, **options).plan(p, m)
    check(plan)
    run = simulate(plan, costs)
    return plan, run.bubble_span if options.get("objective") == "span" else run.bubble


@pytest.mark.parametrize(
    ("costs", "stages", "most", "bound"),
    [
        (ROW_15, 1, 0.1585, 0.1083),
        (ROW_15, 2, 0.0703, 0.0589),
        (ROW_62, 4, 0.0383, 0.0285),
    ],
)
def test_bubbles_at_1f1bs_memory_with_measured_costs(costs, stages, most, bound) -> None:
    plan, bubble = planned(costs, 8, 24, memory=8, max_stages_per_rank=stages)
    assert bound <= bubble <= most + 5e-5
    assert max(simulate(plan, costs).peak_memory) <= 8 + 1e-9


@pytest.mark.parametrize(
    ("costs", "kept", "memory", "rate"),
    [
        (ROW_15, 32 / 87.25, 8, 0.1585),
        (ROW_15, 32 / 87.25, 16, 0.0433),
        (ROW_62, 32 / 74, 8, 0.1323),
        (ROW_62, 32 / 74, 16, 0.0029),
    ],
)
def test_the_zero_bubble_papers_rates_with_its_memory_of_the_weight_half(costs, kept, memory, rate) -> None:
    costs = Costs(
        costs.forward,
        costs.backward_input,
        costs.backward_weight,
        send=costs.send,
        weight_activation=kept,
    )
    _, bubble = planned(costs, 8, 24, memory=memory, objective="span", max_stages_per_rank=1)
    assert round(bubble, 4) <= rate


def named_that_fit(costs: Costs, cap: float, p: int, m: int, v: int) -> list[float]:
    lengths = []
    for name in set(available_schedules()) - {"Auto", "ForwardOnly", "FromTable", "FromTorch"}:
        schedule: Schedule = get_schedule(name, **({"stages_per_rank": v} if name in LOOPS else {}))
        if schedule.stages_per_rank == v:
            run = simulate(schedule.plan(p, m), costs)
            if max(run.peak_memory) <= cap + 1e-9:
                lengths.append(run.makespan)
    return lengths


def test_random_costs_never_worse_than_the_best_named_and_mostly_better() -> None:
    random_ = random.Random(7)
    better = 0
    for _ in range(24):
        p, v = random_.choice((2, 3, 4)), random_.choice((1, 2))
        m = random_.choice((p, 2 * p, 2 * p + 1, 3 * p))
        forward = [random_.uniform(0.5, 1.5) / v for _ in range(p * v)]
        weight = [f * random_.uniform(0.4, 1.1) for f in forward]
        share = [1 / v] * (p * v)
        costs = Costs(forward, forward, weight, send=random_.uniform(0, 0.2) / v, activation=share)
        cap = max(1.0, random_.uniform(0.5, 2) * p)
        run = simulate(Auto(costs=costs, memory=cap).plan(p, m), costs)
        check(run.plan)
        assert max(run.peak_memory) <= cap + 1e-9
        assert run.plan.num_stages == p * v
        best = min(named_that_fit(costs, cap, p, m, v), default=float("inf"))
        assert run.makespan <= best + 1e-9
        better += run.makespan < best - 1e-9
    assert better >= 12


COST = st.floats(0.1, 2.0)


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 4), st.integers(1, 8), COST, COST, COST, st.floats(0, 0.5), st.floats(1.0, 6.0))
def test_no_plan_beats_the_bound_of_its_own_number_of_stages(p, m, f, b, w, hop, memory) -> None:
    costs = Costs(f, b, w, send=hop)
    plan = Auto(costs=costs, memory=memory, max_stages_per_rank=3).plan(p, m)
    check(plan)
    run = simulate(plan, costs)
    head = (p - 1) * (f * p / plan.num_stages + hop)
    assert run.makespan >= head + m * (f + b + w) - 1e-9
    assert max(run.peak_memory) <= memory + 1e-9


def test_optimum_of_a_constraint_solver_at_full_memory() -> None:
    plan = Auto(costs=Costs(1, 1, 1), memory=4, max_stages_per_rank=1).plan(4, 8)
    assert simulate(plan, Costs(1, 1, 1)).makespan == pytest.approx(27)


def test_planning_twice_gives_the_same_plan() -> None:
    plans = [Auto(costs=ROW_15, max_stages_per_rank=2).plan(4, 8) for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_slow_stage_is_planned_around() -> None:
    costs = Costs([1, 2, 1, 1], [1, 2, 1, 1], [1, 2, 1, 1])
    plan = Auto().reorder((0, 1, 2, 3), 8, costs)
    one_f_one_b = simulate(get_schedule("1F1B").plan(4, 8), costs).makespan
    assert simulate(plan, costs).makespan < 0.95 * one_f_one_b


def test_reordering_leaves_the_stages_where_they_are() -> None:
    for placement in ((0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 1, 0, 0, 1)):
        plan = Auto().reorder(placement, 5, Costs([1.0] * len(placement), 1, 1))
        assert tuple(plan.rank_of(stage) for stage in range(plan.num_stages)) == placement


def test_without_costs_there_is_one_stage_per_rank() -> None:
    auto = get_schedule("auto")
    assert auto.plan(3, 4).num_stages == 3 and auto.stages_per_rank == 1


def test_memory_by_rank_is_kept_by_rank() -> None:
    memory = [2.0, 4.0, 1.0]
    run = simulate(Auto(costs=Costs(1, 1, 1), memory=memory).plan(3, 6), Costs(1, 1, 1))
    assert all(peak <= cap + 1e-9 for peak, cap in zip(run.peak_memory, memory, strict=True))


def test_what_cannot_be_planned_says_why() -> None:
    with pytest.raises(ConfigurationError, match=r"objective='rate': choose.*max_stages_per_rank=0"):
        Auto(objective="rate", max_stages_per_rank=0)
    with pytest.raises(ScheduleError, match=r"memory=0\.5 holds no plan: one micro-batch alone takes 1"):
        Auto(costs=Costs(1, 1, 1), memory=0.5).plan(2, 2)
    with pytest.raises(ScheduleError, match="costs are given for 3 stages, which 2 ranks cannot share"):
        Auto(costs=Costs([1, 2, 3], 1, 1)).plan(2, 2)
    with pytest.raises(ScheduleError, match="memory is given for 3 ranks, not for 2"):
        Auto(costs=Costs(1, 1, 1), memory=[1, 2, 3]).plan(2, 2)


def test_a_plan_for_8_ranks_and_8_microbatches_takes_3_million_calls() -> None:
    assert calls_of(lambda: Auto(costs=ROW_15).plan(8, 8)) < 3.5e6, "for 64 it is five times as many"
