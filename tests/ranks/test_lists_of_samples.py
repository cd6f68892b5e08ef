"""Batches that are lists of samples, as `collate_fn=list` leaves them: they are cut by items, whatever is in them."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_pipeline.data import Loaded, split_batch
from tests.pool import Pool
from tests.ranks.lightning_cases import trainer, weights

Ranks = Callable[[int], Pool]
LENGTHS = [[5, 9, 6, 4, 3, 7], [5, 9, 6, 4, 4, 7], [6, 6, 6, 4, 4, 4], [5, 4, 4]]


def samples() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(4)
    return [
        {
            "x": torch.randn(length, 5, generator=made, dtype=torch.float64),
            "y": torch.randint(4, (length,), generator=made),
        }
        for lengths in LENGTHS
        for length in lengths
    ]


class Tagger(pl.LightningModule):
    """Pads in its step."""

    by_batches = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 8).double(), nn.Linear(8, 4).double()

    def training_step(self, batch: list[dict[str, Tensor]], batch_idx: int) -> Tensor:
        x = pad_sequence([one["x"] for one in batch], batch_first=True)
        y = pad_sequence([one["y"] for one in batch], batch_first=True, padding_value=-100)
        found = self.last(self.first(x).tanh())
        return F.cross_entropy(found.flatten(0, 1), y.flatten(), ignore_index=-100)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> Any:
        if self.by_batches:
            batches = BatchSampler(SequentialSampler(samples()), 6, drop_last=False)
            return DataLoader(samples(), batch_sampler=[list(one) for one in batches], collate_fn=list)
        return DataLoader(samples(), batch_size=6, collate_fn=list)


class ByBatches(Tagger):
    by_batches = True


def fitted(pipeline: dict[str, Any] | None, kind: type[Tagger]) -> dict[str, Tensor]:
    module = kind()
    trainer(pipeline).fit(module)
    return weights(module)


@pytest.mark.parametrize("kind", [ByBatches, Tagger])
def test_samples_of_several_lengths_are_cut_by_items(ranks: Ranks, kind: type[Tagger]) -> None:
    expected = fitted(None, kind)
    found = [fitted({"stages": 1, "num_microbatches": 2}, kind)]
    found += ranks(2)(fitted, {"stages": 2, "num_microbatches": 3}, kind, group=False)
    for own in found:
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def of(*shapes: Sequence[int]) -> list[Tensor]:
    return [torch.zeros(*shape) for shape in shapes]


@pytest.mark.parametrize(
    ("batch", "loaded", "sizes"),
    [
        (of([11], [12], [12], [14]), Loaded(sizes=frozenset({4})), [2, 2]),
        (of([3, 8, 8], [3, 9, 9], [3, 7, 7], [3, 8, 9]), Loaded(sizes=frozenset({4})), [2, 2]),
        (of([8, 6], [8, 3], [5, 3]), Loaded(sizes=frozenset({8, 3})), [4, 4]),
        (of([3, 6], [3, 3], [5, 3]), Loaded(sizes=frozenset({8, 3})), [2, 1]),
        ([{"x": one, "y": one} for one in of([8, 6], [24, 6])], Loaded(several=True), [12, 12]),
        ([{"x": one} for one in of([8, 6], [24, 6])], Loaded(sizes=frozenset({2})), [1, 1]),
        (of([4, 6], [4, 3]), Loaded(sizes=frozenset({4, 2})), [2, 2]),
        (of([1, 9], [1, 9]), Loaded(sizes=frozenset({2})), [1]),
        (of([7, 9], [7, 3]), Loaded(sizes=frozenset({8, 2})), [4, 3]),
        (of([3, 6], [3, 3], [3, 9]), Loaded(sizes=frozenset({8})), [2, 1]),
    ],
)
def test_the_loader_says_whether_a_list_holds_samples(batch: Any, loaded: Loaded, sizes: list[int]) -> None:
    found = split_batch(batch, 2, loaded=loaded)
    assert [size for _, size in found] == sizes
    holds_samples = len(batch) == sum(sizes) != 3
    assert len(found[0][0]) == (sizes[0] if holds_samples else len(batch))
