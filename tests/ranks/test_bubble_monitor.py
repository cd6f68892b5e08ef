"""What `BubbleMonitor` reports is what happened, whatever surrounds the schedule."""

import csv
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor, bubble, memory, rankmemory, report
from lightning_pipeline.callbacks.shares import CATEGORIES
from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, Regression, loader, trainer
from tests.ranks.sleeping import Did, Reads, SleepyNet, run_asleep, sleepy_trainer

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
        share, idle, forward = happened([did[step] for _, did in by_rank])
        off.setdefault("bubble", []).append(values["bubble_fraction"] / share - 1)
        for rank, name in enumerate(names_in(values)):
            off.setdefault(f"{name} idle", []).append(values[f"{name}/idle_s"] / idle[rank] - 1)
            off.setdefault(f"{name} forward", []).append(values[f"{name}/forward_s"] / forward[rank] - 1)
    for name in names_in(reported[0]):
        parts = sum(step.get(f"{name}/{part}_s", 0.0) for step in reported for part in CATEGORIES)
        steps = sum(step["step_time_s"] for step in reported)  # ranks end up to some ms apart
        assert parts == pytest.approx(steps, rel=0.01, abs=0.03)
    wrong = {name: values for name, values in off.items() if abs(median(values)) > 0.03}
    assert not wrong


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
        channel = run.strategy._running.executor.channels[0]
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


def told() -> list[str]:
    """What the monitors say on this rank from now on."""
    texts: list[str] = []
    bubble.rank_zero_info = memory.rank_zero_info = rank_zero_only(texts.append)  # type: ignore[assignment]
    return texts


class SlowData(Dataset[Any]):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 8 * self.batches

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return torch.full((FEATURES,), float(index), dtype=torch.float64), torch.zeros(3)


class SlowStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        time.sleep(0.03)
        return loss


class Busy(SleepyNet):
    """Everything around the schedule takes its time; validation takes longest."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.15)
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return SlowStep(self.parameters(), lr=0.01)


class SlowHook(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.02)


def run_busy() -> tuple[list[dict[str, float]], list[str]]:
    reads, texts = Reads(), told()
    run = sleepy_trainer(
        2, 2, BubbleMonitor(every_n_steps=1), reads, SlowHook(), accumulate_grad_batches=2, max_epochs=2,
        val_check_interval=2,
    )  # fmt: skip
    run.fit(Busy([(0.002, 0.002)] * 2), DataLoader(SlowData(6), batch_size=8), loader(samples=16))
    return reads.steps, texts


def test_data_optimizer_and_hooks_are_told_apart_and_validation_is_none_of_them(ranks: Ranks) -> None:
    steps, (table,) = ranks(2)(run_busy)[0]
    assert len(steps) == 12
    assert "would save" not in table, "a tenth of the schedule is little of such a step"
    for name in ("stage_0", "stage_1"):
        seen = {key: [step[f"{name}/{key}_s"] for step in steps] for key in ("data", "optimizer", "other")}
        assert median(seen["data"]) == pytest.approx(8 * 0.005, rel=0.25)
        accumulating, stepping = seen["optimizer"][0::2], seen["optimizer"][1::2]
        assert median(accumulating) < 0.01
        assert median(stepping) == pytest.approx(0.03, abs=0.012)
        assert median(seen["other"][1::2]) > 0.018, "the hook of the batch before"
        assert median(seen["other"][2::4]) < median(seen["other"][1::2]), "no batch is before a validation's"
    assert max(step["step_time_s"] for step in steps[1:]) < 0.3, "a validation takes 0.3 s at least"


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rankmemory, "peak_bytes", peak_bytes)
        patch.setattr(report, "peak_bytes", peak_bytes)
        run.fit(module, loader(samples=8 * 10))
    return reads.steps, texts


def test_replicas_log_the_same_their_mean_in_time_and_most_in_memory(ranks: Ranks) -> None:
    results = ranks(4)(run_replicas)
    steps, texts = results[0]
    assert all(other == (steps, []) for other in results[1:]), "rank 0 alone speaks"
    assert 0.08 <= median(step["stage_0/forward_s"] for step in steps[1:]) < 0.11, "4 times 10 and 30 ms"
    assert [steps[-1][f"stage_{stage}/peak_memory_gib"] for stage in (0, 1)] == [11.0, 12.0]
    memory_table, times = sorted(texts)
    assert [line.split()[-4:-2] for line in times.splitlines()[4:6]] == [["11.0", "GiB"], ["12.0", "GiB"]]
    assert [line.split()[-2:] for line in memory_table.splitlines()[3:5]] == [
        ["11.0", "GiB"],
        ["12.0", "GiB"],
    ]


def fit_in_a_special_run(options: dict[str, Any]) -> Any:
    texts, monitor = told(), BubbleMonitor()
    run = trainer({"stages": 2, "num_microbatches": 2}, callbacks=[monitor], **options)
    run.fit(Regression(), loader(64), loader())
    return sorted(key for key in run.callback_metrics if key.startswith("pipeline/")), texts


@pytest.mark.parametrize(
    "options",
    [
        {"barebones": True, "log_every_n_steps": None, "num_sanity_val_steps": None},
        {"logger": False},
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"max_epochs": 1, "log_every_n_steps": 100},
        {"max_epochs": 1, "limit_train_batches": 0, "limit_val_batches": 0},
    ],
    ids=["barebones", "no logger", "one batch", "three batches", "a short epoch", "no batch"],
)
def test_nothing_breaks_in_a_special_run(ranks: Ranks, options: dict[str, Any]) -> None:
    (keys, texts), other = ranks(2)(fit_in_a_special_run, options)
    assert (keys, []) == other
    logs = not options.get("barebones") and options.get("limit_train_batches") != 0
    assert ("pipeline/bubble_fraction" in keys) == logs
    assert len(texts) == (options.get("limit_train_batches") != 0)
    if options.get("fast_dev_run") is True:
        assert texts[0].startswith("Pipeline: 1 step of ")
        assert texts[0].endswith("\nThese are a fit's first steps, which are slow: they tell little")
        assert "would save" not in texts[0]
    else:
        assert all("first steps" not in text for text in texts)


class Steps(pl.Callback):
    def __init__(self) -> None:
        self.monitored: list[float] = []

    def on_train_epoch_end(self, run: pl.Trainer, *_: Any) -> None:
        self.monitored.append(float(run.callback_metrics["pipeline/stage_1/forward_s"]))


def fit_logged(folder: str, every: int) -> Any:
    steps, logger = Steps(), CSVLogger(folder, name="log", version="0")
    stop = EarlyStopping("pipeline/bubble_fraction", mode="max", patience=0, min_delta=2.0)
    run = trainer(
        {"stages": 2, "num_microbatches": 2}, logger=logger, log_every_n_steps=every, max_epochs=9,
        callbacks=[stop, BubbleMonitor(), StageMemoryMonitor(), steps], accumulate_grad_batches=2,
    )  # fmt: skip
    run.fit(Regression(), loader(64))
    return steps.monitored, run.current_epoch, run.global_step


@pytest.mark.parametrize(("every", "rows"), [(2, [1, 3, 5, 7]), (50, [3, 7]), (0, [])])
def test_keys_reach_loggers_where_lightning_logs_and_callbacks_in_every_epoch(
    ranks: Ranks, tmp_path: Path, every: int, rows: list[int]
) -> None:
    results = ranks(2)(fit_logged, str(tmp_path), every)
    assert results[0] == results[1]
    assert results[0][1:] == (2, 8), "the bubble cannot grow by 2"
    with (tmp_path / "log" / "0" / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))

    def steps_with(key: str) -> list[int]:
        return [int(line["step"]) for line in lines if line.get(key)]

    assert steps_with("pipeline/bubble_fraction") == steps_with("pipeline/stage_0/buffers_gib") == rows
    assert steps_with("train_loss_step") == (rows if every == 2 else [])


def fit_with_tables() -> list[str]:
    texts = told()
    run = trainer({"stages": 2}, callbacks=[BubbleMonitor(every_n_epochs=2)], max_epochs=4)
    run.fit(Regression(), loader())
    return texts


def test_tables_come_when_asked_for_and_say_what_to_know(ranks: Ranks) -> None:
    texts = ranks(2)(fit_with_tables)[0]
    assert [text.split(" of ")[0] for text in texts] == ["Pipeline: 4 steps", "Pipeline: 10 steps"]
    lines = texts[-1].splitlines()
    assert lines[0].startswith("Pipeline: 10 steps of ")
    assert " samples/s; of a step schedule " in lines[0]
    assert lines[1].startswith("Bubble ")
    assert ": schedule " in lines[1] and "imbalance " in lines[1]
    assert lines[2].split()[:2] == ["stage", "parameters"]
    assert [line.split()[0] for line in lines[4:6]] == ["stage_0", "stage_1"]


def fit_twice() -> list[float]:
    monitor = BubbleMonitor()
    run = trainer({"stages": 2, "num_microbatches": 2}, callbacks=[monitor], max_epochs=1)
    run.fit(Regression(), loader())
    first = monitor.seconds_inside
    again = trainer({"stages": 2, "num_microbatches": 2}, callbacks=[monitor], max_epochs=1)
    again.fit(Regression(), loader())
    return [first, monitor.seconds_inside]


def test_a_monitor_serves_two_runs_and_counts_its_own_time(ranks: Ranks) -> None:
    for first, both in ranks(2)(fit_twice):
        assert 0 < first < both < 5
