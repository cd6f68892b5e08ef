"""A rank without memory ends all ranks with its memory table, and with what would help there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.callbacks import StageMemoryMonitor
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
    run = trainer({"partition": ["net.4"], **pipeline}, callbacks=callbacks)
    run.fit(OutOfMemory(how), loader(24))


CASES = [
    ("device", {"stages": 2, "schedule": "GPipe", "num_microbatches": 4}, True, True),
    ("host", {"stages": 2, "schedule": "1F1B", "num_microbatches": 4}, False, False),
]


@pytest.mark.parametrize(("how", "pipeline", "watched", "advised"), CASES, ids=["device", "host"])
def test_every_rank_reads_the_table_and_the_advice(
    ranks: Ranks, how: str, pipeline: dict[str, Any], watched: bool, advised: bool
) -> None:
    for outcome in ranks(2).outcomes(fit_hungry, how, pipeline, watched, timeout=30, dies=True):
        print(outcome.output)
