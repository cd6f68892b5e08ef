from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipeline.errors import ConfigurationError, ScheduleError
from lightning_pipeline.schedules import (
    Costs,
    ForwardOnly,
    FromTable,
    FromTorch,
    LoopedBFS,
    OneFOneB,
    check,
    get_schedule,
    simulate,
)

NAMED = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBH1", "ZBH2", "InterleavedZeroBubble", "ZBV"]
NAMED += ["VHalf", "VMin", "DualPipeV"]
LOOPS = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]


def options(name: str, v: int) -> dict[str, int]:
    return {"stages_per_rank": v} if name in LOOPS else {}


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(NAMED), st.integers(1, 9), st.integers(1, 24), st.integers(1, 4))
def test_every_size_is_served_with_a_plan_that_can_be_run(name, p, m, v) -> None:
    schedule = get_schedule(name, **options(name, v))
    plan = schedule.plan(p, m)
    check(plan)
    assert (plan.num_ranks, plan.num_microbatches) == (p, m)
    assert plan.num_stages == p * schedule.stages_per_rank
    assert schedule.placement(p) == tuple(plan.rank_of(stage) for stage in range(plan.num_stages))
    check(ForwardOnly(like=schedule).plan(p, m + 1))
    check(plan.first((m + 1) // 2))


@pytest.mark.parametrize("name", NAMED)
def test_placements_are_a_loop_or_a_v(name: str) -> None:
    schedule = get_schedule(name, **options(name, 2))
    expected = {1: (0, 1, 2), 2: (0, 1, 2, 0, 1, 2) if name in LOOPS else (0, 1, 2, 2, 1, 0)}
    assert schedule.placement(3) == expected[schedule.stages_per_rank]


@pytest.mark.parametrize("name", LOOPS)
def test_a_rank_holds_at_least_one_stage(name: str) -> None:
    with pytest.raises(ConfigurationError, match="stages_per_rank=0: a rank holds at least 1 stage"):
        get_schedule(name, stages_per_rank=0)


COST = st.floats(0.1, 3.0)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMED), st.integers(1, 5), st.integers(1, 3), COST, COST, COST, st.floats(0, 1))
def test_no_schedule_beats_a_lower_bound(
    name, p, rounds, forward, backward_input, backward_weight, send
) -> None:
    m = 2 * p * rounds
    plan = get_schedule(name, **options(name, 2)).plan(p, m)
    run = simulate(plan, Costs(forward, backward_input, backward_weight, send=send))
    work = m * (forward + backward_input + backward_weight)
    head = (p - 1) * (forward * p / plan.num_stages + send)
    latency = forward + backward_input + 2 * (p - 1) * send
    assert run.span >= work - 1e-9
    assert run.makespan >= max(head + work, latency) - 1e-9


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("m", [8, 12])
@pytest.mark.parametrize(
    ("name", "torchs"),
    [
        ("GPipe", "GPipe"),
        ("1F1B", "1F1B"),
        ("Interleaved1F1B", "Interleaved1F1B"),
        ("InterleavedZeroBubble", "InterleavedZeroBubble"),
        ("ZBV", "ZBVZeroBubble"),
        ("DualPipeV", "DualPipeV"),
    ],
)
def test_orders_equal_torchs(name: str, torchs: str, p: int, m: int) -> None:
    pytest.importorskip("torch")
    if m % p == 0:
        assert get_schedule(name).plan(p, m) == FromTorch(torchs).plan(p, m)


def test_torchs_looped_bfs_is_read_as_it_is_written() -> None:
    pytest.importorskip("torch")
    plan = FromTorch("LoopedBFS", stages_per_rank=3).plan(2, 4)
    assert plan.num_stages == 6 and [a.microbatch for a in plan[0][-4:]] == [3, 2, 1, 0]
    assert plan != LoopedBFS(3).plan(2, 4)


def test_a_torch_class_is_read_too() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = FromTorch(schedules.Schedule1F1B)
    assert schedule.plan(3, 5) == OneFOneB().plan(3, 5)
    assert repr(schedule) == "FromTorch('Schedule1F1B', stages_per_rank=1)"


def test_what_torch_refuses_is_told() -> None:
    pytest.importorskip("torch")
    with pytest.raises(
        ScheduleError, match=r"torch's Schedule1F1B does not serve 4 ranks and 3 .*\(3\) must"
    ):
        FromTorch("1F1B").plan(4, 3)
    with pytest.raises(ScheduleError, match="torch has no schedule 'ZBH9'"):
        FromTorch("ZBH9")


def test_a_table_serves_the_sizes_it_was_written_for(tmp_path) -> None:
    plan = get_schedule("DualPipeV").plan(3, 6)
    plan.to_csv(tmp_path / "mine.csv")
    schedule = get_schedule("FromTable", path=tmp_path / "mine.csv")
    assert schedule.plan(3, 6) == plan
    assert schedule.plan(3, 5) == plan.first(5)
    assert (schedule.stages_per_rank, schedule.placement(3)) == (2, (0, 1, 2, 2, 1, 0))
    with pytest.raises(ScheduleError, match="serves 3 ranks and up to 6 micro-batches, not 3 and 7"):
        schedule.plan(3, 7)


def test_a_table_that_cannot_be_run_is_refused_when_it_is_read(tmp_path) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0B0,0B0\n")
    with pytest.raises(ScheduleError, match="bad.csv holds no plan that can be run: rank 0, position 2"):
        FromTable(tmp_path / "bad.csv")
    with pytest.raises(ScheduleError, match="no.csv holds no plan"):
        FromTable(tmp_path / "no.csv")


@pytest.mark.parametrize("name", ["ZBV", "DualPipeV", "Interleaved1F1B", "VHalf", "InterleavedZeroBubble"])
def test_torchs_runtime_reads_our_tables(name: str, tmp_path) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    get_schedule(name).plan(4, 8).to_csv(tmp_path / "plan.csv")
    stages = [
        SimpleNamespace(stage_index=4 * local, num_stages=8, group_size=4, group_rank=0) for local in (0, 1)
    ]
    runtime = schedules._PipelineScheduleRuntime(stages, 8)
    runtime._load_csv(tmp_path / "plan.csv")  # it validates the order and adds its own messages
    assert set(runtime.pipeline_order_with_comms) == {0, 1, 2, 3}
