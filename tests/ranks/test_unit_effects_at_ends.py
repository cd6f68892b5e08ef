"""What units keep where it does not travel, is large, or is set by hooks: when the run ends, and before."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.hooks import epoch_end
from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, loader, trainer

Ranks = Callable[[int], Pool]
PIPELINE = {"stages": 2, "num_microbatches": 2}


class _Scale:
    """Something of the user's that no rank can be told."""

    def __init__(self, by: float) -> None:
        self.by = by


class Caches(nn.Module):
    """Makes an object at its first call, and keeps what it returned last."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self._cache: _Scale | None = None
        self.kept: dict[int, Tensor] = {}
        self.note: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self._cache is None:
            self._cache = _Scale(0.5)
        result: Tensor = self._cache.by * self.linear(x).tanh()
        self.kept = {0: result.detach().repeat(1, 2000)}
        return result


class Cached(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Caches(FEATURES, 5), Caches(5, TARGETS)).double()

    def on_train_end(self) -> None:
        with torch.no_grad():
            self.net(torch.ones(3, FEATURES, dtype=torch.float64))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


class Notes(pl.Callback):
    """Puts an object on every layer after each batch, and reads it at the epoch's end."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for layer in pl_module.net:
            layer.note = _Scale(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen += [layer.note.by for layer in pl_module.net]


def fit_and_test(pipeline: dict[str, Any] | None) -> tuple[float, list[float]]:
    module, notes = Cached(), Notes()
    run = trainer(pipeline, callbacks=[notes])
    run.fit(module, loader(16))
    layers: Any = module.net
    made = [one._cache for one in layers if one._cache is not None]
    assert made
    assert all(type(one) is _Scale for one in made)
    run.test(module, loader(8, seed=4), verbose=False)
    return float(run.callback_metrics["test_loss"]), notes.seen


def test_objects_that_units_or_hooks_make_are_no_guards_after_the_run(ranks: Ranks) -> None:
    loss, seen = fit_and_test(None)
    for found, noted in ranks(2)(fit_and_test, PIPELINE):
        assert found == pytest.approx(loss, rel=1e-9)
        assert noted == seen


def kept_after(largest: int | None) -> list[int | None]:
    """For each layer how many rows it kept: 3 of the call after the last epoch, 8 of the last batch."""
    before = epoch_end.LARGEST
    epoch_end.LARGEST = largest or before
    try:
        module = Cached()
        run = trainer(PIPELINE, max_epochs=1)
        run.fit(module, loader(16))
    finally:
        epoch_end.LARGEST = before
    layers: Any = module.net
    return [len(one.kept[0]) if one.kept else None for one in layers]


@pytest.mark.parametrize(("largest", "expected"), [(None, [[3, 3], [3, 3]]), (1000, [[None, 3], [3, None]])])
def test_what_is_larger_than_ranks_are_told_stays_where_it_is_and_is_no_guard_elsewhere(
    ranks: Ranks, largest: int | None, expected: Any
) -> None:
    """The last stage is on rank 0."""
    assert ranks(2)(kept_after, largest) == expected


class _Company:
    """Of ranks 2 and 3, this being one of them."""

    ranks = (2, 3)

    def __init__(self, rank: int) -> None:
        self.rank, self.gathered = rank, 0

    def gather(self, what: str, value: Any) -> dict[int, Any]:
        self.gathered += 1
        return dict.fromkeys(self.ranks, value)


class _Units:
    def told(self, largest: int) -> int:
        return largest


@pytest.mark.parametrize(("getting", "exchanges"), [((), 0), ((0,), 0), ((3,), 1), ((0, 2, 3), 1)])
def test_at_the_end_ranks_get_what_units_keep_that_get_the_whole_module(
    getting: tuple[int, ...], exchanges: int
) -> None:
    for rank in _Company.ranks:
        company: Any = _Company(rank)
        units: Any = _Units()
        told = epoch_end.units_at_end(units, company, getting.__contains__)
        assert told == ([epoch_end.LARGEST] * 2 if rank in getting else [])
        assert company.gathered == exchanges
