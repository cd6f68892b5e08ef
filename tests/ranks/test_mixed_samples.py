"""Samples that a step mixes over two ranks: weights of every stage equal one device's on the whole batch."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.cases import Ranks
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights
from tests.unit.split.test_mixing import (
    by_numbers_between,
    fitted,
    flipped,
    mixup,
    whitened,
)

MIXING = flipped, whitened, by_numbers_between
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "1F1B"}, {"schedule": "ZBH1"}, {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda given: given["schedule"])
def test_ranks_have_their_samples_of_what_one_device_mixes(ranks: Ranks, schedule: dict[str, Any]) -> None:
    expected = [fitted(function, None) for function in MIXING]
    found = ranks(2)(all_fitted, {"stages": 2, "num_microbatches": 3, **schedule}, group=False)
    for on_rank in found:
        for one, other in zip(on_rank, expected, strict=True):
            assert_same(one, other)


def test_ranks_draw_alike_to_mix_samples(ranks: Ranks) -> None:
    found = ranks(2)(fitted, mixup, {"stages": 2, "num_microbatches": 3}, group=False)
    expected = ranks(2)(fitted, mixup, {"stages": 2, "num_microbatches": 1}, group=False)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def all_fitted(pipeline: dict[str, Any]) -> list[Any]:
    return [fitted(function, pipeline) for function in MIXING]


class MixesInside(nn.Module):
    """A layer, without the mean over the samples."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        made: Tensor = self.inner(h)
        return made - made.mean(0)


def layers_told_of() -> list[str]:
    """What a rank says of layers that mix samples, one on each rank."""
    module = Regression()
    module.net[0], module.net[6] = MixesInside(module.net[0]), MixesInside(module.net[6])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = trainer({"stages": 2, "num_microbatches": 2}, max_epochs=1, limit_val_batches=0)
        run.fit(module, loader(), loader(seed=4))
    return re.findall(r"the forward of (.*?) mixes the samples", " ".join(str(one.message) for one in seen))


def test_a_layer_that_mixes_samples_is_told_of_by_one_rank(ranks: Ranks) -> None:
    told = ranks(2)(layers_told_of, group=False)
    assert sorted(told) == [["net.0 (MixesInside)"], ["net.6 (MixesInside)"]]


class OfNoColumns(Regression):
    """Its batch has tensors without elements, as of models that are given no further features."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, without, flags, y = batch
        scale = x.abs().mean(1, keepdim=True)
        out = self.net(torch.cat([x / scale, without], 1)) * scale
        return (out - y).square().mean() + without.sum() + flags.sum()


def of_no_columns(pipeline: dict[str, Any] | None) -> Any:
    module, run = OfNoColumns(), trainer(pipeline)
    x, y = loader().dataset.tensors  # type: ignore[attr-defined]
    empty = torch.zeros(len(x), 0, dtype=torch.float64), torch.zeros(len(x), 4, 0, dtype=torch.bool)
    run.fit(module, DataLoader(TensorDataset(x, *empty, y), batch_size=8))
    return weights(module), {}


@pytest.mark.parametrize("stages", [1, 2])
def test_tensors_without_elements_are_no_obstacle(ranks: Ranks, stages: int) -> None:
    expected = of_no_columns(None)
    for found in ranks(stages)(of_no_columns, {"stages": stages, "num_microbatches": 2}, group=False):
        assert_same(found, expected)
