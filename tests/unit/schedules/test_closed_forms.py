"""The formulas and tables of the literature, to the last digit."""

import pytest

from lightning_pipeline.schedules import (
    ZBH1,
    ZBH2,
    ZBV,
    Costs,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    InterleavedZeroBubble,
    LoopedBFS,
    OneFOneB,
    Schedule,
    VHalf,
    VMin,
    simulate,
)

F, B, W, C = 2.0, 3.0, 1.5, 0.25
T = F + B + W
SIZES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16), (8, 32)]
TABLE_SIZES = [(4, 8), (4, 16), (8, 16), (8, 32)]
TABLE = [
    (GPipe(), (0.2727, 0.1579, 0.3043, 0.1795), None),
    (OneFOneB(), (0.2727, 0.1579, 0.3043, 0.1795), (4, 8)),
    (Interleaved1F1B(2), (0.1579, 0.0857, 0.1795, 0.0986), (5.5, 11.5)),
    (Interleaved1F1B(4), (0.0857, 0.0448, 0.0986, 0.0519), (4.75, 9.75)),
    (ZBH1(), (0.1111, 0.0588, 0.1273, 0.0680), (4, 8)),
    (ZBH2(), (0.1111, 0.0588, 0.1273, 0.0680), (7, 15)),
    (InterleavedZeroBubble(2), (0.0588, 0.0303, 0.0680, 0.0352), (4, 8)),
    (InterleavedZeroBubble(4), (0.0303, 0.0154, 0.0352, 0.0179), (4, 8)),
    (ZBV(), (0.0588, 0.0303, 0.0680, 0.0352), (4, 8)),
    (VHalf(), (0.0943, 0.0495, 0.1504, 0.0813), (3, 5)),
    (VMin(), (0.1864, 0.1028, 0.2195, 0.1233), (2, 4)),
]


def extra(schedule: Schedule, p: int, m: int, *, hop: float = 0.0, span: bool = False) -> float:
    simulation = simulate(schedule.plan(p, m), Costs(F, B, W, send=hop))
    return (simulation.span if span else simulation.makespan) - m * T


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_times_are_the_closed_forms(p: int, m: int) -> None:
    assert extra(GPipe(), p, m, hop=C) == pytest.approx((p - 1) * T + 2 * (p - 1) * C)
    hops = 2 * (p - 1) * m / p + 2 * (p - 2)
    assert extra(OneFOneB(), p, m, hop=C) == pytest.approx((p - 1) * T + hops * C)
    assert extra(ZBH1(), p, m, hop=C) == pytest.approx((p - 1) * (F + B - W) + 4 * (p - 1) * C)
    span = (p - 1) * (F + B - 2 * W) + 2 * (p - 1) * C
    assert extra(ZBH2(), p, m, hop=C, span=True) == pytest.approx(span)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_times_of_loops_are_the_closed_forms(p: int, m: int, v: int) -> None:
    hops = 2 * (p * v - 1) * C
    assert extra(Interleaved1F1B(v), p, m, hop=C) == pytest.approx((p - 1) * T / v + hops)
    assert extra(LoopedBFS(v), p, m) == pytest.approx((p - 1) * T / v)
    assert extra(InterleavedZeroBubble(v), p, m) == pytest.approx((p - 1) * (F + B - W) / v)


@pytest.mark.parametrize(("schedule", "bubbles", "peaks"), TABLE, ids=lambda value: repr(value))
def test_bubbles_and_peaks_are_those_of_the_table(schedule: Schedule, bubbles, peaks) -> None:
    runs = [simulate(schedule.plan(p, m), Costs(1, 1, 1)) for p, m in TABLE_SIZES]
    assert tuple(round(run.bubble, 4) for run in runs) == bubbles
    expected = [p for p in peaks for _ in (0, 1)] if peaks else [m for _, m in TABLE_SIZES]
    assert [max(run.peak_memory) for run in runs] == expected


@pytest.mark.parametrize("schedule", [ZBH2(), ZBV()], ids=repr)
@pytest.mark.parametrize(("p", "m"), TABLE_SIZES)
def test_zero_bubble_schedules_have_none_within_the_span(schedule: Schedule, p: int, m: int) -> None:
    assert simulate(schedule.plan(p, m), Costs(1, 1, 1)).bubble_span == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("p", "m"), TABLE_SIZES)
def test_dualpipe_v_holds_half_a_share_more_than_1f1b(p: int, m: int) -> None:
    assert max(simulate(DualPipeV().plan(p, m), Costs(1, 1, 1)).peak_memory) == p + 0.5


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(1, 10) for m in (1, 3, 8, 19)])
def test_v_schedules_keep_the_memory_they_claim(p: int, m: int) -> None:
    for schedule, claim in ((ZBV(), p), (VHalf(), (p + 2) // 2), (VMin(), (p + 4) // 3)):
        assert max(simulate(schedule.plan(p, m), Costs(1, 1, 1)).peak_memory) <= claim


@pytest.mark.parametrize(
    ("costs", "rates"),
    [
        ((18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
        ((29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    ],
)
def test_measured_costs_give_the_rates_of_the_zero_bubble_paper(costs, rates) -> None:
    *times, send = costs
    for schedule, rate in zip((OneFOneB(), ZBH1(), ZBH2()), rates, strict=True):
        run = simulate(schedule.plan(8, 24), Costs(*times, send=send))
        assert round(run.bubble_span, 4) == rate


def test_outside_their_condition_v_schedules_lose_with_every_microbatch() -> None:
    costs = Costs(1, 2, 1)
    bubbles = [round(simulate(s.plan(4, 16), costs).bubble, 4) for s in (VHalf(), VMin(), OneFOneB())]
    assert bubbles == [0.1688, 0.3756, 0.1579]
