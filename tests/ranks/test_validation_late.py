"""A validation that stumbles over what hooks before it set is traced when it comes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, fit

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}


class SetLate(Regression):
    """Its validation reads what a hook before it sets."""

    def on_validation_start(self) -> None:
        self.scale = 2.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.scale * self.loss(batch))


def test_a_validation_that_reads_what_a_hook_sets_runs(ranks: Ranks, tmp_path: Path) -> None:
    expected = fit(None, SetLate, writes=str(tmp_path / "one"))
    for found in ranks(2)(partial(fit, writes=str(tmp_path / "two")), TWO, SetLate):
        assert_same(found, expected)
