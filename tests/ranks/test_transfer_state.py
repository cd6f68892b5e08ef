"""What hooks on a batch's way to the device keep: the first batch is looked at before the run, which leaves no trace."""

import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import SumMetric

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Keeps:
    """A plain object."""

    def __init__(self) -> None:
        self.seen, self.generator = torch.zeros((), dtype=torch.float64), numpy.random.default_rng(0)


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))


def written(kept: Any) -> Tensor:
    kept += 1
    return kept.clone()


def counted(kept: Counter[str]) -> int:
    kept["batches"] += 1
    return kept["batches"]


def updated(kept: SumMetric) -> float:
    kept.update(1.0)
    return float(kept.sum_value)  # type: ignore[arg-type]


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "NumPy's generator": (lambda: numpy.random.default_rng(0), lambda kept: kept.random()),
    "NumPy's state": (lambda: numpy.random.RandomState(0), lambda kept: kept.rand()),
    "torch's generator": (
        lambda: torch.Generator().manual_seed(0),
        lambda kept: torch.rand((), generator=kept),
    ),
    "Python's generator": (lambda: random.Random(0), lambda kept: kept.random()),
    "counts": (itertools.count, next),
    "an iterator": (lambda: iter([1, 5, 2, 7, 3, 4, 8, 1, 6, 9]), next),
    "a tensor": (lambda: torch.zeros((), dtype=torch.float64), written),
    "a counter": (Counter, counted),
    "a buffer": (Bank, lambda kept: written(kept.seen)),
    "a metric": (SumMetric, updated),
    "a tensor of an object": (Keeps, lambda kept: written(kept.seen)),
    "a generator of an object": (Keeps, lambda kept: kept.generator.random()),
}


class Scales:
    """Scales each batch by what it keeps."""

    kept: Any
    uses: Callable[[Any], Any]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * (1 + 0.1 * float(type(self).uses(self.kept))), batch[1]]


class ScalesItself(Scales, Regression):
    pass


class Data(Scales, pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(seed=4)


def fitted(pipeline: dict[str, Any] | None, name: str, owner: str) -> Any:
    made, uses = KINDS[name]
    base: Any = Data if owner == "data module" else ScalesItself
    scales = type(base.__name__, (base,), {"uses": staticmethod(uses)})()
    scales.kept = made()
    module = Regression() if owner == "data module" else scales
    run = trainer(pipeline, max_epochs=1, num_sanity_val_steps=1)
    if owner == "data module":
        run.fit(module, datamodule=scales)
    else:
        run.fit(module, loader(), loader(seed=4))
    return weights(module), {key: float(value) for key, value in run.callback_metrics.items()}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("owner", ["module", "data module"])
@pytest.mark.parametrize("name", KINDS)
def test_a_hook_finds_what_it_has_kept_itself(ranks: Ranks, name: str, owner: str, stages: int) -> None:
    expected = fitted(None, name, owner)
    for found in ranks(stages)(fitted, {"stages": stages, "num_microbatches": 2}, name, owner, group=False):
        assert_same(found, expected)


class Rates(Regression):
    """Has the parts of a schedule at hand, in the order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = OrderedDict(first=1.0, second=2.0)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.recent[f"batch {len(self.recent)}"] = self.recent.popitem(last=False)[1] + 1
        self.recent.move_to_end("second", last=False) if "second" in self.recent else None
        return [batch[0] * sum(self.recent.values()), batch[1]]


def rated(pipeline: dict[str, Any] | None) -> Any:
    module, run = Rates(), trainer(pipeline, max_epochs=1, limit_val_batches=0)
    run.fit(module, loader())
    return weights(module), dict(enumerate(module.recent.values()))


def test_an_ordered_dictionary_of_a_hook_is_as_it_was() -> None:
    assert_same(rated({"stages": 1, "num_microbatches": 2}), rated(None))
