"""Stages are timed as they run, and the module is as before afterwards."""

import os
from random import Random
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.predict import predict
from lightning_pipeline.forecast.workload import unit_times
from lightning_pipeline.forecast.workload.beside import copies_beside
from lightning_pipeline.forecast.workload.times import StageTimes
from lightning_pipeline.forecast.workload.unit_times import MeasuredWorkload
from lightning_pipeline.schedules import Action, get_schedule, simulate
from tests.naps import Nap
from tests.unit.split.pipe import Module


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = nn.Linear(4, 4), seconds
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tensor: Tensor) -> Tensor:
        return Nap.apply(self.norm(self.inner(tensor)), self.seconds, 2 * self.seconds)


class Sleepers(Module):
    """Layers that take known times."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Sleeper, seconds))
        self.calls = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            batch = layer(batch)
        self.log("loss", batch.sum())
        return batch.sum()


@pytest.fixture(scope="module")
def module() -> Sleepers:
    return Sleepers(0.01, 0.02)


@pytest.fixture(scope="module")
def work(module: Sleepers) -> MeasuredWorkload:
    told: list[tuple[str, int, int]] = []
    found = MeasuredWorkload(
        module, (torch.randn(8, 4), 0), how="uniform", progress=lambda *done: told.append(done)
    )
    torch.manual_seed(5)
    found.before = (dict(module.named_buffers()), torch.get_rng_state())  # type: ignore[attr-defined]
    found.values = {name: value.clone() for name, value in module.state_dict().items()}  # type: ignore[attr-defined]
    with mock.patch.multiple(unit_times, PASSES=1, ROUNDS=3):
        found.times(2, Assumptions())
    assert told == [("timing 2 stages", 0, 2), ("timing 2 stages", 1, 2)]
    return found


def test_forwards_and_backwards_take_what_they_sleep(work: MeasuredWorkload) -> None:
    times = work.times(2, Assumptions())
    for stage, nap in enumerate((0.01, 0.02)):
        assert nap <= times.forward[stage] < 2 * nap
        assert nap <= times.forward_split[stage] < 2 * nap
        assert 2 * nap <= times.backward[stage] < 4 * nap
        assert 2 * nap <= times.backward_input[stage] < 4 * nap
        assert times.backward_weight[stage] < nap


def test_the_simulator_gets_the_measured_times(work: MeasuredWorkload) -> None:
    one_each = get_schedule("1F1B")  # others would have four stages measured too
    (found,) = predict(work, 2, 4, Assumptions(latency=0, link_bytes=1e30), own=one_each, only=True)
    run = found.simulation
    times = work.times(2, Assumptions())
    for timed in run.actions:
        name = "forward" if timed.action.kind == "F" else "backward"
        took = [pytest.approx(seen, rel=1e-6) for seen in times.seen[name][timed.action.stage]]
        assert timed.end - timed.start in took


def test_a_step_of_times_that_vary_takes_longer_than_one_of_their_medians() -> None:
    two, none = (2.0, 2.0), (0.0, 0.0)
    seen = {"forward": [[1.0, 2.0, 3.0]] * 2, "backward": [[2.0]] * 2}
    times = StageTimes(two, two, two, none, none, none, none, none, none, seen)
    plan = get_schedule("1F1B").plan(2, 8)
    costs, dice = times.costs(False, [1.0, 1.0]), Random(1)
    even = simulate(plan, costs).makespan
    drawn = [times.drawn(plan, costs, dice) for _ in range(200)]
    forwards = {time for step in drawn for action, time in step.items() if action.kind == "F"}
    assert forwards == {1.0, 2.0, 3.0}
    assert {step[Action(1, "B", 5)] for step in drawn} == {2.0}
    found = sorted(simulate(plan, costs, times=step).makespan for step in drawn)[100]
    assert 1.03 * even < found < 1.15 * even  # each rank waits for the other's longer forwards


def test_a_forward_before_a_split_backward_has_its_own_time() -> None:
    both = (1.0, 1.0)
    times = StageTimes(both, (3.0, 3.0), both, both, both, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    held = [1.0, 1.0]
    assert times.costs(False, held).per_stage([1, 1]).forward == (1.0, 1.0)
    assert times.costs(True, held).per_stage([1, 1]).forward == (3.0, 3.0)


def test_ranks_are_busy_with_messages_but_not_working() -> None:
    two = (2.0, 2.0)
    times = StageTimes(two, two, (4.0, 4.0), two, two, (0.0, 1.5), (0.0, 1.5), (0.0, 0.5), (0.0, 0.25))
    assert times.handling() == ([0.5, 0.25], [0.25, 0.5])
    assert times.handling(within={1}) == ([0.0, 0.0], [0.0, 0.0])
    plan = get_schedule("GPipe").plan(2, 2)
    # rank 1: F 3.25-5.5 and, after a wait, 5.75-8, B -12.5 and -17; rank 0: B 13.25-17.5 and 17.75-22
    run = simulate(plan, times.costs(False, [1.0, 1.0]))
    assert run.makespan == 22.0


def test_the_table_shows_the_measured_shares(work: MeasuredWorkload) -> None:
    times = work.times(2, Assumptions())
    shares = [row.cost_share for row in work.table(2, Assumptions()).rows]
    assert [row.cost_share for row in work.partition(2).table().rows] == [0.5, 0.5]  # equal layers
    assert shares[0] == pytest.approx((times.forward[0] + times.backward[0]) / times.alone)
    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] < 0.45


def test_nothing_of_the_module_is_changed(work: MeasuredWorkload, module: Sleepers) -> None:
    buffers, state = work.before  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.calls == 0
    assert module.logged == []
    assert all(held is buffers[name] for name, held in module.named_buffers())
    for name, value in module.state_dict().items():
        assert torch.equal(value, work.values[name])  # type: ignore[attr-defined]
    assert module.training_step(torch.randn(8, 4), 0).requires_grad


def test_copies_work_beside_the_block_and_are_gone_after_it() -> None:
    end, begin = os.pipe()
    with copies_beside(2, lambda: os.write(begin, b"x")):
        assert os.read(end, 1) == b"x"  # from a copy: this process writes nothing
    os.close(begin)
    while os.read(end, 1 << 16):  # what they wrote before; then the end, for nobody is left to write
        continue
    os.close(end)
