"""Layers that count padding which a batch has and its micro-batches do not, in their own forward."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import assert_same
from tests.ranks.test_sizes_by_values import EachTexts, Masked, Packs, Tagger, Trims, tagged

Ranks = Callable[[int], Pool]


class Attends(nn.Module):
    """Without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        return torch.softmax(self.scores(words, lengths), -1) @ self.linear(words)

    def scores(self, words: Tensor, lengths: Tensor) -> Tensor:
        return self.linear(words) @ words.mT


class AttendsByMask(Attends):
    def scores(self, words: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(words.shape[1]) < lengths[:, None]
        return super().scores(words, lengths).masked_fill(~mask[:, None], float("-inf"))


class AttendsByPairs(Attends):
    """Words that are padding attend to all that there is, and are left out later."""

    def scores(self, words: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(words.shape[1]) < lengths[:, None]
        return super().scores(words, lengths).masked_fill(~(mask[:, None] & mask[..., None]), -1e9)


class Convolves(nn.Module):
    """Has zeros behind the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(8, 8, 3, padding=1).double()

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        return self.layer(words.mT).mT


class Means(Attends):
    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        return words + self.linear(words.mean(1, keepdim=True))


class Sums(Attends):
    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        return words + self.linear(words.sum(1, keepdim=True))


class InTheMiddle(Masked):
    """A layer after the one that gives as many words as values say."""

    middle: type[nn.Module]

    def __init__(self, kind: type[Trims]) -> None:
        super().__init__(kind)
        self.between = self.middle()

    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        return super().pooled(self.between(found, lengths), lengths)


class Summed(EachTexts):
    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        return found.sum(1) / lengths[:, None]


class Largest(EachTexts):
    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        return found.max(1).values


def of(middle: type[nn.Module]) -> type[Tagger]:
    return type(middle.__name__, (InTheMiddle,), {"middle": middle})


KINDS = {one.__name__: of(one) for one in (Attends, AttendsByMask, AttendsByPairs, Convolves, Means, Sums)}
KINDS |= {"Summed": Summed, "Largest": Largest}


def said(pipeline: dict[str, Any] | None, kind: type[Trims], name: str) -> tuple[list[str], Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = tagged(pipeline, kind, KINDS[name])
    return [str(one.message) for one in caught if "padding" in str(one.message)], found


BETWEEN = "net gives as much for each sample"
ROWS = [
    (Packs, "Attends", "the forward of between goes by"),
    (Packs, "AttendsByMask", ""),
    (Packs, "AttendsByPairs", ""),
    (Packs, "Means", "the forward of between goes by"),
    (Packs, "Sums", ""),  # of zeros
    (Packs, "Summed", ""),
    (Packs, "Largest", BETWEEN),
    (Trims, "AttendsByMask", ""),
    (Trims, "Sums", "the forward of between goes by"),
    (Trims, "Summed", BETWEEN),
    (Packs, "Convolves", ""),  # zeros behind the last word, as the layer has itself
    (Trims, "Convolves", "the forward of between goes by"),
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("kind", "name", "told"), ROWS, ids=lambda one: getattr(one, "__name__", one))
def test_padding_that_a_layer_counts_is_told(
    ranks: Ranks, kind: type[Trims], name: str, told: str, stages: int
) -> None:
    pipeline = {"stages": stages, "num_microbatches": 2}
    every = ranks(stages)(said, pipeline, kind, name, group=False)
    lines = [line for found, _ in every for line in found if "training_step" in line]
    assert len(lines) == bool(told), lines
    assert all(told in line for line in lines)
    if not told:
        expected = tagged(None, kind, KINDS[name])
        for _, found in every:
            assert_same(found, expected)
