"""docs/lightning.md: each row is tried out."""

import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks, loggers, plugins, profilers
from torch import Tensor

from lightning_pipeline.errors import PipelineError
from tests.matrix import ELSEWHERE, ROWS, on_the_page, table
from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}
ROWS_BY_NAME = {row.name: row for row in ROWS}


TOGETHER = [
    "`min_epochs=1`", "`max_steps=4`", "`min_steps=2`", "`limit_val_batches=1`", "`val_check_interval=2`",
    "`num_sanity_val_steps=0`", "`log_every_n_steps=2`", "`benchmark=True`", "`deterministic=True`",
    "`use_distributed_sampler=False`", "`reload_dataloaders_every_n_epochs=1`", "`sync_batchnorm=True`",
    "`max_time=timedelta(hours=1)`", "`CSVLogger`", "`SimpleProfiler`",
    "`precision='64-true'`, `DoublePrecision`", "`LambdaCallback`", "`Timer`", "`RichModelSummary`",
    "`RichProgressBar`", "`LearningRateMonitor`",
]  # fmt: skip
"""Of which `make test` makes one run. By itself none of them takes a line or branch of this package that no other row
takes (coverage of both ranks by row, 2026-11-23)."""


def ran(pipeline: dict[str, Any] | None, name: str, folder: str) -> Any:
    """Weights and logs, or what the refusal says."""
    row = ROWS_BY_NAME[name]
    try:
        return run_with(pipeline, row.options(folder), timed=row.timed, evaluated=row.evaluated)
    except PipelineError as error:
        return str(error)


def run_with(
    pipeline: dict[str, Any] | None, options: dict[str, Any], timed: bool = False, evaluated: bool = False
) -> Any:
    pl.seed_everything(3, verbose=False)
    module = WithTests()
    run = trainer(pipeline, **{"max_epochs": 2, **options})
    run.fit(module, loader(), loader(seed=4))
    if evaluated:
        run.test(module, loader(seed=5), verbose=False)
        predictions = run.predict(module, loader(seed=6))
    logged = {} if timed else {name: float(value) for name, value in run.callback_metrics.items()}
    if not evaluated:
        return weights(module), logged
    return weights(module), logged, [predictions, getattr(run, "written", None)]


class WithTests(Regression):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


@pytest.mark.parametrize("name", ROWS_BY_NAME)
def test_what_a_trainer_is_given_does_what_the_page_says(ranks: Ranks, tmp_path: Path, name: str) -> None:
    row = ROWS_BY_NAME[name]
    found = ranks(2)(ran, TWO, name, str(tmp_path / "two"))
    if row.refused:
        assert all(row.refused in said for said in found)
        return
    expected = ran(None, name, str(tmp_path / "one"))
    for rank, one in enumerate(found):
        assert not isinstance(one, str), one
        assert_same(one[:2], expected[:2], row.tolerance)
        if row.evaluated and rank == 0:
            torch.testing.assert_close(one[2], expected[2], rtol=1e-10, atol=1e-10)
        elif row.evaluated:
            assert one[2][1] is None  # a writer there would write nothing over the files of rank 0


def together(pipeline: dict[str, Any] | None, folder: str) -> Any:
    options: dict[str, Any] = {}
    callbacks_: list[Any] = []
    for name in TOGETHER:
        given = ROWS_BY_NAME[name].options(folder)
        callbacks_ += given.pop("callbacks", [])
        options |= {key: value for key, value in given.items() if key != "enable_checkpointing"}
    return run_with(pipeline, {**options, "callbacks": callbacks_})


def test_several_of_them_together_do_what_each_does(ranks: Ranks, tmp_path: Path) -> None:
    expected = together(None, str(tmp_path / "one"))
    for found in ranks(2)(together, TWO, str(tmp_path / "two")):
        assert_same(found, expected)


def graphed(folder: str) -> None:
    module = Regression()
    module.example_input_array = torch.zeros(1, FEATURES)
    trainer(TWO, **ROWS_BY_NAME["`TensorBoardLogger(log_graph=True)`"].options(folder)).fit(module, loader())


def test_a_graph_is_not_logged(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(
        RankFailure, match="runs the model on rank 0, which has one stage, on example_input_array"
    ):
        ranks(2)(graphed, str(tmp_path))


class Counted(Regression):
    validations = 0

    def on_validation_start(self) -> None:
        self.validations += 1


def validated(pipeline: dict[str, Any] | None) -> tuple[int, Any]:
    """Global rank 0's clock says so after each batch, and the others' never would."""
    module = Counted()
    run = trainer(
        pipeline, num_sanity_val_steps=0, val_check_interval=timedelta(hours=int(os.environ.get("RANK", "0")))
    )
    run.fit(module, loader(), loader(seed=4))
    return module.validations, weights(module)


def test_the_clock_of_global_rank_0_says_when_to_validate(ranks: Ranks) -> None:
    expected = validated(None)
    assert expected[0] == 6  # two epochs of three batches
    for found in ranks(2)(validated, TWO):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_every_name_of_lightnings_has_a_row_or_a_reason() -> None:
    known = " ".join([row.name for row in ROWS] + list(ELSEWHERE))
    given = set(inspect.signature(pl.Trainer.__init__).parameters) - {
        "self",
        "callbacks",
        "plugins",
        "profiler",
    }
    names = [f"`{name}" for name in given]
    for module in (callbacks, loggers, profilers, plugins):
        names += [name for name in module.__all__ if isinstance(getattr(module, name), type)]
    bases = {"BaseFinetuning", "Callback", "Checkpoint", "Logger", "Profiler", "ProgressBar", "CheckpointIO",
             "LayerSync", "Precision"}  # fmt: skip
    assert [name for name in names if name not in known and name not in bases] == []


def test_the_page_shows_the_table() -> None:
    assert on_the_page() == table(), "run python -m tests.matrix"
