"""Runs of every kind with the monitors: what is logged, when, and what they say at the end."""

import csv
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger

from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor
from lightning_pipeline.errors import StageFailedError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer
from tests.ranks.sleeping import told

Ranks = Callable[[int], Pool]


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


class Fails(pl.Callback):
    """After the monitors' figures of a batch have left."""

    def on_before_backward(self, run: pl.Trainer, *_: Any) -> None:
        if run.global_step == 2 and run.strategy.pipeline_rank == 1:  # type: ignore[attr-defined]
            raise ValueError("the disk is full")


def fit_that_fails() -> None:
    run = trainer({"stages": 2}, callbacks=[BubbleMonitor(), StageMemoryMonitor(), Fails()])
    run.fit(Regression(), loader(64))


def test_a_rank_that_fails_while_figures_travel_is_named_and_nobody_waits(ranks: Ranks) -> None:
    outcomes = ranks(2).outcomes(fit_that_fails, timeout=100)
    (failed,) = [outcome for outcome in outcomes if isinstance(outcome.error, ValueError)]
    (other,) = [outcome for outcome in outcomes if outcome is not failed]
    assert isinstance(other.error, StageFailedError) and "the disk is full" in str(other.error)
    assert not other.hung


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
    assert lines[0].endswith(" samples/s") and lines[1].startswith("Of a step: schedule ")
    assert lines[2].startswith("Bubble ")
    assert ": schedule " in lines[2] and "imbalance " in lines[2]
    assert lines[3].startswith("Schedule ") and lines[3].endswith(" ms of equal ones")
    assert lines[4].startswith("Each device does ") and lines[4].endswith("FLOP/s")
    assert lines[5].split()[:2] == ["stage", "parameters"]
    assert [line.split()[0] for line in lines[7:9]] == ["stage_0", "stage_1"]


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


CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 6
  log_every_n_steps: 1
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  enable_model_summary: false
  strategy: {class_path: lightning_pipeline.PipelineStrategy, init_args: {stages: 2, num_microbatches: 2, on_nonfinite: raise}}
  callbacks:
    - class_path: lightning_pipeline.callbacks.BubbleMonitor
      init_args: {every_n_steps: 2, every_n_epochs: 1}
    - class_path: lightning_pipeline.callbacks.StageMemoryMonitor
    - class_path: lightning_pipeline.callbacks.PipelineTimeline
      init_args: {steps: [1, 3], dirpath: FOLDER, png: false}
model: {layers: 2, width: 16}
data: {batch_size: 4}
"""


def fit_by_config(config: str) -> tuple[list[str], dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from gpt import GPT, StandardLibrary

    texts = told()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")
        cli = LightningCLI(
            GPT, StandardLibrary, args=["fit", "--config", config], save_config_callback=None
        )  # fmt: skip
    return texts, dict(cli.trainer.progress_bar_callback.get_metrics(cli.trainer, cli.model))


def test_a_config_has_the_callbacks_the_bar_the_bubble_and_the_table_tokens(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path / "steps")))
    (texts, bar), (silent, other) = ranks(2)(fit_by_config, str(tmp_path / "config.yaml"))
    assert silent == []
    assert 0 < bar["bubble"] == other["bubble"] < 1
    memory_table, times = sorted(texts)
    assert memory_table.startswith("Memory, activations at the worst moment\n")
    step, tokens = re.match(
        r"Pipeline: 4 steps of ([\d.]+) ms, [\d,]+ samples/s, ([\d,]+) tokens/s\n", times
    ).groups()
    assert float(tokens.replace(",", "")) == pytest.approx(
        4 * 65e3 / float(step), rel=1e-3
    )  # the step is printed rounded
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {
        f"timeline-{step}.{kind}" for step in (1, 3) for kind in ("json", "svg")
    }
