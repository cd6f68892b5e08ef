"""A rank without memory ends all ranks with its memory table, and with what would help there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.callbacks import StageMemoryMonitor
from lightning_pipeline.run.batch import is_out_of_memory
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Hungry(nn.Linear):
    """In its fifth forward for real, memory is out, as on a GPU or as on CPU."""

    def __init__(self, how: str) -> None:
        super().__init__(8, 8, dtype=torch.float64)
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not while the step is traced
            self.calls += 1
        if self.calls == 5:
            if self.how == "device":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            torch.empty(1 << 60)
        return super().forward(x)


class OutOfMemory(Regression):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net[4] = Hungry(how)


def fit_hungry(how: str, pipeline: dict[str, Any], watched: bool) -> None:
    callbacks = [StageMemoryMonitor()] if watched else []
    run = trainer(pipeline, callbacks=callbacks)
    run.fit(OutOfMemory(how), loader(24))


RECOMPUTE = "recompute: with torch.utils.checkpoint around the units this rank would hold "
TWO = {"stages": 2, "partition": ["net.4"], "num_microbatches": 4}
CASES = [
    ("device", {**TWO, "schedule": "GPipe"}, True, ["schedule='1F1B'", RECOMPUTE], ["num_microbatches"]),
    ("host", {**TWO, "schedule": "1F1B"}, False, ["num_microbatches=8"], ["schedule="]),
    ("host", {**TWO, "schedule": "1F1B", "partition": ["net.2"]}, False, ["partition=['net.4']"], []),
    ("device", {**TWO, "stages": 3, "partition": ["net.4", "net.6"]}, False, ["num_microbatches=8"], []),
]


@pytest.mark.parametrize(("how", "pipeline", "watched", "advised", "useless"), CASES)
def test_every_rank_reads_the_table_and_advice_that_fits(
    ranks: Ranks, how: str, pipeline: dict[str, Any], watched: bool, advised: list[str], useless: list[str]
) -> None:
    stages = pipeline["stages"]
    for outcome in ranks(stages).outcomes(fit_hungry, how, pipeline, watched, timeout=30, dies=True):
        assert outcome.exit_code == 1
        assert outcome.seconds < 10
        error = (
            "OutOfMemoryError: CUDA out of memory" if how == "device" else "can't allocate memory: you tried"
        )
        assert error in outcome.output
        text = outcome.output.rpartition("Out of memory on rank 1 (stage 1, cpu) in 1F0 (stage 1, ")[2]
        assert text, "the table names rank, stage and action"
        rows = text.splitlines()
        assert rows[1].split() == [
            "stage", "parameters", "gradients", "optimizer", "activations", "micro-batches", "at", "the", "peak",
        ]  # fmt: skip
        cells = [cell.strip() for cell in rows[3].split("  ") if cell.strip()]
        assert cells[0] == "1"
        assert cells[1] == cells[3] != "0 B"  # SGD with momentum
        assert cells[2] == "0 B"  # those of the step before are gone, those of this one not there yet
        assert "largest resident set" in rows[4]
        assert all(f"  - {line}" in text for line in [*advised, "more stages"])
        assert not any(f"  - {line}" in text for line in useless)


def fit_with_too_large_a_state() -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if dist.get_rank() == 0:
                raise MemoryError("no memory for the optimizer's state")

    class Large(Regression):
        def configure_optimizers(self) -> Any:
            return Optimizer(self.parameters(), lr=0.1)

    trainer({"stages": 2, "num_microbatches": 2}).fit(Large(), loader())


def test_an_optimizer_without_memory_is_explained_too(ranks: Ranks) -> None:
    for outcome in ranks(2).outcomes(fit_with_too_large_a_state, timeout=30, dies=True):
        assert "MemoryError: no memory for the optimizer's state" in outcome.output
        assert "Out of memory on rank 1 (stage 1, cpu)" in outcome.output


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_for_want_of_memory_are_known(error: Exception, known: bool) -> None:
    assert is_out_of_memory(error) is known
    wrapped = ValueError("in the user's code")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is known
