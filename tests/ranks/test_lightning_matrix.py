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
from tests.matrix import ELSEWHERE, ROWS, Row, on_the_page, table
from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}
ROWS_BY_NAME = {row.name: row for row in ROWS}


def ran(pipeline: dict[str, Any] | None, names: list[str], folder: str) -> list[Any]:
    """Weights and logs of each, or what the refusal says."""
    return [_ran(pipeline, row, f"{folder}/{number}") for number, row in enumerate(_rows(names))]


def _ran(pipeline: dict[str, Any] | None, row: Row, folder: str) -> Any:
    pl.seed_everything(3, verbose=False)
    module = WithTests()
    try:
        run = trainer(pipeline, **{"max_epochs": 2, **row.options(folder)})
        run.fit(module, loader(), loader(seed=4))
        if row.evaluated:
            run.test(module, loader(seed=5), verbose=False)
            predictions = run.predict(module, loader(seed=6))
    except PipelineError as error:
        return str(error)
    logged = {} if row.timed else {name: float(value) for name, value in run.callback_metrics.items()}
    if not row.evaluated:
        return weights(module), logged
    return weights(module), logged, [predictions, getattr(run, "written", None)]


class WithTests(Regression):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def _rows(names: list[str]) -> list[Row]:
    return [ROWS_BY_NAME[name] for name in names]


PARTS = {
    f"{section} {start}": names[start : start + 6]
    for section in dict.fromkeys(row.section for row in ROWS)
    for names in [[row.name for row in ROWS if row.section == section]]
    for start in range(0, len(names), 6)
}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_trainer_is_given_does_what_the_page_says(ranks: Ranks, tmp_path: Path, part: str) -> None:
    names = PARTS[part]
    served = [row.name for row in _rows(names) if not row.refused]
    expected = dict(zip(served, ran(None, served, str(tmp_path / "one")), strict=True))
    for rank, found in enumerate(ranks(2)(ran, TWO, names, str(tmp_path / "two"))):
        for row, result in zip(_rows(names), found, strict=True):
            if row.refused:
                assert row.refused in result, row.name
            else:
                assert not isinstance(result, str), (row.name, result)
                assert_same(result[:2], expected[row.name][:2], row.tolerance)
                if row.evaluated and rank == 0:
                    torch.testing.assert_close(result[2], expected[row.name][2], rtol=1e-10, atol=1e-10)


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
