"""What `BubbleMonitor` reports is what happened, whatever surrounds the schedule."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor
from lightning_pipeline.measure import memory as rankmemory
from lightning_pipeline.measure import report
from lightning_pipeline.measure.shares import CATEGORIES
from lightning_pipeline.recording import timeline
from tests import naps
from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, loader
from tests.ranks.sleeping import Did, Reads, SleepyNet, run_asleep, sleepy_trainer, told

pytestmark = pytest.mark.quiet  # times are compared with a clock

Ranks = Callable[[int], Pool]
ZERO_BUBBLE = "ZBH1"
GIB = 2**30


def happened(per_rank: list[list[Did]]) -> tuple[float, list[float], list[float]]:
    """Bubble, and by rank idle and forward seconds, as the stopwatch saw one step."""
    calls = [did for mine in per_rank for did in mine]
    makespan = max(did.end for did in calls) - min(did.begin for did in calls)
    idle = [makespan - sum(did.end - did.begin for did in mine) for mine in per_rank]
    forward = [sum(did.end - did.begin for did in mine if did.kind == "F") for mine in per_rank]
    return sum(idle) / (len(idle) * makespan), idle, forward


def names_in(values: dict[str, float]) -> list[str]:
    return [key.removesuffix("/idle_s") for key in values if key.endswith("/idle_s")]


def assert_accurate(results: list[Any]) -> None:
    reported = results[0][0]
    assert all(other == reported for other, *_ in results), "all ranks log the same"
    by_rank = results[::-1]  # global rank 0 holds the last stage
    off: dict[str, list[float]] = {}
    for step, values in enumerate(reported):
        share, idle, forward = happened([did[step] for _, did, _ in by_rank])
        off.setdefault("bubble", []).append(values["bubble_fraction"] / share - 1)
        for rank, name in enumerate(names_in(values)):
            off.setdefault(f"{name} idle", []).append(values[f"{name}/idle_s"] / idle[rank] - 1)
            off.setdefault(f"{name} forward", []).append(values[f"{name}/forward_s"] / forward[rank] - 1)
    wrong = {name: values for name, values in off.items() if abs(median(values)) > 0.03}
    assert not wrong
    assert_nothing_is_left_over(reported, [ends for *_, ends in by_rank])


def assert_nothing_is_left_over(reported: list[dict[str, float]], ends: list[list[float]]) -> None:
    """The categories of a rank add up to its step, from the end of a batch to the end of the next."""
    names = names_in(reported[0])
    sums = [[sum(step.get(f"{n}/{part}_s", 0.0) for part in CATEGORIES) for step in reported] for n in names]
    for step, values in enumerate(reported):
        assert sum(mine[step] for mine in sums) / len(names) == pytest.approx(values["step_time_s"], rel=1e-5)
    for name, mine, at in zip(names, sums, ends, strict=True):
        off = [took / (end - begin) - 1 for took, begin, end in zip(mine[1:], at, at[1:], strict=False)]
        assert abs(median(off)) < 0.01, (name, off)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", ZERO_BUBBLE])
@pytest.mark.parametrize("stages", [2, 4])
def test_bubble_idle_and_forward_are_what_a_second_stopwatch_sees(
    ranks: Ranks, stages: int, schedule: str, uneven: bool
) -> None:
    blocks = 2 * stages if schedule == "Interleaved1F1B" else stages
    each = 0.01 * stages / blocks
    seconds = [(each, each)] * blocks
    if uneven:
        seconds[1] = (1.6 * each, 1.6 * each)
    results = ranks(stages)(run_asleep, stages, schedule, seconds)
    assert_accurate(results)
    last = {key: median(step[key] for step in results[0][0][1:]) for key in results[0][0][0]}
    for rank, name in enumerate(names_in(last)):
        known = 4 * sum(forward for forward, _ in seconds[rank::stages])
        assert known < last[f"{name}/forward_s"]
        assert min(step[f"{name}/forward_s"] for step in results[0][0]) < 2 * known
    if uneven:
        assert last["slowest_stage"] == 1
        assert last["bubble_fraction_simulated"] > last["bubble_fraction_equal_stages"]


class SlowWire:
    """In place of a link's outgoing group: messages arrive late, and the sender does not wait for them."""

    def __init__(self, group: Any) -> None:
        self.group, self.pool, self.delay = group, ThreadPoolExecutor(1), 0.0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        delay = self.delay

        def later() -> Any:
            time.sleep(delay)
            return self.group.send(tensors, peer, tag)

        future = self.pool.submit(later)

        class Work:
            def wait(self, timeout: Any) -> None:
                future.result().wait(timeout)

        return Work()


class Delays(pl.Callback):
    """From the fourth step on, the last gradients that stage 1 sends back are late."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def on_train_start(self, run: pl.Trainer, *_: Any) -> None:
        if 1 not in run.strategy.stages_here:
            return
        channel = run.strategy._running.split.executor.channels[0]
        wire = channel.link._outgoing = SlowWire(channel.link._outgoing)
        send = channel.send_gradients

        def send_gradients(stage: int, microbatch: int, gradients: Any) -> None:
            wire.delay = self.delay if microbatch == 3 and run.global_step >= 3 else 0.0
            send(stage, microbatch, gradients)
            wire.delay = 0.0

        channel.send_gradients = send_gradients


def run_delayed(delay: float) -> list[dict[str, float]]:
    reads = Reads()
    run = sleepy_trainer(2, 2, BubbleMonitor(every_n_steps=1), reads, Delays(delay))
    run.fit(SleepyNet([(0.004, 0.004)] * 2), loader(samples=8 * 7))
    return reads.steps


def test_a_delayed_message_is_waiting_on_the_stage_that_needs_it(ranks: Ranks) -> None:
    steps = ranks(2)(run_delayed, 0.2)[0]

    def grew(key: str) -> float:
        return median(step[key] for step in steps[3:]) - median(step[key] for step in steps[1:3])

    assert grew("stage_0/waiting_steady_s") == pytest.approx(0.2, rel=0.2)
    assert grew("stage_0/idle_s") == pytest.approx(0.2, rel=0.2)
    assert abs(grew("stage_1/waiting_steady_s")) < 0.04
    assert abs(grew("stage_1/waiting_start_s")) < 0.04
    assert abs(grew("stage_0/forward_s")) < 0.04
    assert grew("stage_1/waiting_drain_s") == pytest.approx(0.2, rel=0.2)
    assert grew("bubble_fraction") > 0.2
    assert abs(grew("bubble_fraction_simulated")) < 0.1


class Own:
    """A clock of this rank's own, which goes on where somebody sleeps by it and nowhere else."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def __call__(self) -> int:
        return self.nanoseconds

    def sleep(self, seconds: float) -> None:
        self.nanoseconds += round(1e9 * seconds)

    @contextmanager
    def told(self) -> Iterator["Own"]:
        """Inside, layers sleep by this clock, and times of a run are read from it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timeline, "clock", self)
            patch.setattr(naps, "sleep", self.sleep)
            yield self


class SlowData(Dataset[Any]):
    def __init__(self, batches: int, clock: Own) -> None:
        self.batches, self.clock = batches, clock

    def __len__(self) -> int:
        return 8 * self.batches

    def __getitem__(self, index: int) -> Any:
        self.clock.sleep(0.005)
        return torch.full((FEATURES,), float(index), dtype=torch.float64), torch.zeros(3)


class SlowStep(torch.optim.SGD):
    clock: Own

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.clock.sleep(0.03)
        return loss


class Busy(SleepyNet):
    """Everything around the schedule takes its time; validation takes longest."""

    def __init__(self, clock: Own) -> None:
        super().__init__([(0.002, 0.002)] * 2)
        self.clock = [clock]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def on_validation_batch_start(self, *_: Any) -> None:
        self.clock[0].sleep(0.15)

    def configure_optimizers(self) -> Any:
        optimizer = SlowStep(self.parameters(), lr=0.01)
        optimizer.clock = self.clock[0]
        return optimizer


class SlowHook(pl.Callback):
    def __init__(self, clock: Own) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.sleep(0.02)


def run_busy() -> tuple[list[dict[str, float]], list[str]]:
    reads, texts = Reads(), told()
    with Own().told() as clock:
        run = sleepy_trainer(
            2, 2, BubbleMonitor(every_n_steps=1), reads, SlowHook(clock), accumulate_grad_batches=2,
            max_epochs=2, val_check_interval=2,
        )  # fmt: skip
        run.fit(Busy(clock), DataLoader(SlowData(4, clock), batch_size=8), loader(samples=16))
    return reads.steps, texts


def test_data_optimizer_and_hooks_are_told_apart_and_validation_is_none_of_them(ranks: Ranks) -> None:
    steps, (table,) = ranks(2)(run_busy)[0]
    assert len(steps) == 8
    assert "would save" not in table, "a tenth of the schedule is little of such a step"
    for name in ("stage_0", "stage_1"):
        seen = {key: [step[f"{name}/{key}_s"] for step in steps] for key in ("data", "optimizer", "other")}
        assert seen["data"] == pytest.approx([8 * 0.005] * 8)
        assert seen["optimizer"] == pytest.approx([0.0, 0.03] * 4), "every other batch steps"
        # The hook of the batch before; no batch is before the first of an epoch, or of those after a validation.
        assert seen["other"] == pytest.approx([0.0, 0.02] * 4)
    data_and_schedule = 8 * 0.005 + 4 * (0.002 + 0.002)
    of_each = [data_and_schedule, data_and_schedule + 0.03 + 0.02]
    assert [step["step_time_s"] for step in steps] == pytest.approx(of_each * 4), (
        "without a validation's time"
    )


def run_replicas() -> tuple[list[dict[str, float]], list[str]]:
    """Replicas that differ in time and memory."""
    reads, module, texts = Reads(), SleepyNet([(0.01, 0.01)] * 2), told()
    run = sleepy_trainer(
        2, 2, BubbleMonitor(every_n_steps=1), StageMemoryMonitor(), reads, pipeline={"data_parallel_size": 2}
    )  # fmt: skip
    for block in module.net:
        block.forward_seconds = 0.01 if run.strategy.replica_index == 0 else 0.03

    def peak_bytes(device: torch.device) -> int:
        return GIB * (10 * run.strategy.replica_index + 1 + run.strategy.stage_index())

    with Own().told(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rankmemory, "peak_bytes", peak_bytes)
        patch.setattr(report, "peak_bytes", peak_bytes)
        run.fit(module, loader(samples=8 * 10))
    return reads.steps, texts


def test_replicas_log_the_same_their_mean_in_time_and_most_in_memory(ranks: Ranks) -> None:
    results = ranks(4)(run_replicas)
    steps, texts = results[0]
    assert all(other == (steps, []) for other in results[1:]), "rank 0 alone speaks"
    forward = [step["stage_0/forward_s"] for step in steps]
    assert forward == pytest.approx([4 * 0.02] * len(steps)), "4 times 10 and 30 ms"
    assert [steps[-1][f"stage_{stage}/peak_memory_gib"] for stage in (0, 1)] == [11.0, 12.0]
    memory_table, times = sorted(texts)
    count, milliseconds, rate = map(
        float, re.match(r"Pipeline: (\d+) steps of ([\d.]+) ms, (\d+) ", times).groups()
    )
    assert (count, rate) == (3, pytest.approx(16e3 / milliseconds, abs=1)), "samples of both replicas"
    rows = [line for line in times.splitlines() if line.startswith("stage_")]
    assert [line.split()[-4:-2] for line in rows] == [["11.0", "GiB"], ["12.0", "GiB"]]
    assert [line.split()[-2:] for line in memory_table.splitlines()[3:5]] == [
        ["11.0", "GiB"],
        ["12.0", "GiB"],
    ]
