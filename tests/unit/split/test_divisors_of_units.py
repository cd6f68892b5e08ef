"""A loss divided by what a unit computes, or inside a unit by weights of classes: right, or refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from tests.unit.split.nets import WIDTH, Net, batch_of, seeded
from tests.unit.split.pipe import assert_whole


class Counting(nn.Module):
    """The sum of a mask, or a number that is the same for every micro-batch."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.scale, self.counts = nn.Parameter(torch.full((), 2.0, dtype=torch.float64)), counts

    def forward(self, mask: Tensor) -> Tensor:
        return mask.sum() + 0 * self.scale if self.counts else self.scale.exp()


class Divides(Net):
    counts, reduction = True, "sum"

    def __init__(self) -> None:
        super().__init__()
        self.count = Counting(counts=self.counts)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.head(self.body(self.emb(batch["x"])))
        value = (out - batch["y"]).pow(2).mean(-1) * (batch["mask"] if self.reduction == "sum" else 1.0)
        summed: Tensor = value.sum() if self.reduction == "sum" else value.mean()
        return summed / self.count(batch["mask"])


class DividesMean(Divides):
    reduction = "mean"


class Constant(Divides):
    counts, reduction = False, "mean"


class Masked(Constant):
    """A mean over the targets that are there, times such a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.head(self.body(self.emb(batch["x"])))
        return F.cross_entropy(out, batch["classes"], ignore_index=0) / self.count(batch["mask"])


class ByClasses(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head, self.options = nn.Linear(WIDTH, 3, dtype=torch.float64), options

    def forward(self, h: Tensor, classes: Tensor) -> Tensor:
        weight = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
        return F.cross_entropy(self.head(h), classes, weight=weight, **self.options)


class Weighted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = ByClasses()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        result: Tensor = self.criterion(self.body(self.emb(batch["x"])), batch["classes"])
        return result


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = batch_of(8)
    made["classes"] = torch.randint(0, made["y"].shape[-1], (8,), generator=generator).clamp(max=2)
    made["mask"] = torch.tensor([1.0, 1, 1, 0, 0, 1, 0, 0], dtype=torch.float64)
    return made


REFUSED = {
    Divides: r"divided by what differs between micro-batches.*test_divisors_of_units\.py:\d+",
    DividesMean: r"divided by a number that a unit computes from the micro-batch.*microbatch_weight.*\.py:\d+",
    Weighted: r"unit 'criterion' computes a mean over classes with weights.*loss_weighting='samples'.*\.py:\d+",
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("stages", [2, 3])
def test_what_differs_from_the_batch_is_refused_with_its_line(kind: type[Net], stages: int) -> None:
    with pytest.raises(SplitError, match=REFUSED[kind]):
        assert_whole(seeded(kind), batch(), stages)


@pytest.mark.parametrize("kind", [Constant, Masked])
def test_a_number_of_a_unit_that_is_always_the_same_is_right(kind: type[Net]) -> None:
    assert_whole(seeded(kind), batch(), 2)
