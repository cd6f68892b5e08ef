"""Batches that are, or hold, objects of the project's own classes, such as DETR's images with their mask."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline.data import how_cut, split_batch
from tests.pool import Pool
from tests.ranks.lightning_cases import trainer, weights

Ranks = Callable[[int], Pool]
Sample = tuple[Tensor, dict[str, Tensor]]


class Padded:
    """Sequences of several lengths, and where nothing stands."""

    def __init__(self, values: Tensor, mask: Tensor) -> None:
        self.values, self.mask = values, mask

    def to(self, device: torch.device) -> "Padded":
        return Padded(self.values.to(device), self.mask.to(device))


class Graph:
    """Rows of nodes, of edges and of graphs."""

    def __init__(self) -> None:
        self.nodes, self.edges, self.y = torch.zeros(9, 2), torch.zeros(2, 12), torch.zeros(4)


def samples() -> list[Sample]:
    made = torch.Generator().manual_seed(4)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=made))

    return [
        (
            torch.randn(whole(3, 8), 5, generator=made, dtype=torch.float64),
            {"labels": torch.randint(4, (whole(1, 4),), generator=made)},
        )
        for _ in range(24)
    ]


def padded(batch: list[Sample]) -> tuple[Padded, list[dict[str, Tensor]]]:
    longest = max(len(values) for values, _ in batch)
    values = torch.zeros(len(batch), longest, 5, dtype=torch.float64)
    mask = torch.ones(len(batch), longest, dtype=torch.bool)
    for row, (own, _) in enumerate(batch):
        values[row, : len(own)], mask[row, : len(own)] = own, False
    return Padded(values, mask), [targets for _, targets in batch]


class Matches(pl.LightningModule):
    """A loss in a loop over the targets of each sample, over how many there are in the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 8).double(), nn.Linear(8, 4).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.last(self.first(batch[0].values).tanh())
        labels = [target["labels"] for target in batch[1]]
        each = [
            F.cross_entropy(mine[: len(theirs)], theirs, reduction="sum")
            for mine, theirs in zip(found, labels, strict=True)
        ]
        loss = sum(each) / sum(map(len, labels))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=6, collate_fn=padded)


class Alone(Matches):
    """The object is the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.last(self.first(batch.values).tanh())
        there = (~batch.mask).to(found)
        loss = (found.square().sum(-1) * there).sum() / there.sum()
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=6, collate_fn=lambda batch: padded(batch)[0])


def fitted(pipeline: dict[str, Any] | None, kind: type[Matches]) -> tuple[dict[str, Tensor], float]:
    module = kind()
    run = trainer(pipeline, max_epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one device")
        run.fit(module)
    return weights(module), float(run.callback_metrics["loss"])


@pytest.mark.parametrize("kind", [Matches, Alone])
def test_what_such_an_object_holds_is_cut_with_the_batch(ranks: Ranks, kind: type[Matches]) -> None:
    expected, loss = fitted(None, kind)
    found = [fitted({"stages": 1, "num_microbatches": 2}, kind)]
    found += ranks(2)(fitted, {"stages": 2, "num_microbatches": 3}, kind, group=False)
    for own, logged in found:
        assert logged == pytest.approx(loss, rel=1e-6)
        for name, weight in expected.items():
            torch.testing.assert_close(own[name], weight, rtol=1e-9, atol=1e-12)


def test_a_graph_is_not_cut_by_rows() -> None:
    graph = Graph()
    parts = [part for part, _ in split_batch((graph, torch.zeros(4)), 2)]
    assert all(one is graph for one, _ in parts)
    assert [len(y) for _, y in parts] == [2, 2]
    cut, whole = how_cut((graph, torch.zeros(4)), parts[0])
    assert [place.name for place in cut] == ["batch[1]"]
    assert [place.name for place in whole] == ["batch[0].nodes", "batch[0].edges", "batch[0].y"]


class Boxes:
    """What is in one image, by rows; the last two numbers are its size."""

    def __init__(self, number: int) -> None:
        self.boxes, self.size = torch.zeros(number, 4), torch.tensor([8, 8])


@pytest.mark.parametrize("numbers", [(2, 2, 3, 2), (4, 4, 4, 4), (1, 2, 3, 4), (2, 3, 5, 6)])
def test_objects_that_each_sample_has_are_cut_by_items(numbers: tuple[int, ...]) -> None:
    batch = torch.zeros(4, 3, 8, 8), list(map(Boxes, numbers))
    parts = [part for part, size in split_batch(batch, 2) if size == 2]
    assert [len(images) for images, _ in parts] == [2, 2]
    assert [one for _, boxes in parts for one in boxes] == batch[1]


def test_objects_of_one_class_for_two_languages_are_both_cut() -> None:
    batch = padded(samples()[:4])[0], padded(samples()[4:8])[0]
    parts = [part for part, _ in split_batch(batch, 2)]
    assert [[len(one.values) for one in part] for part in parts] == [[2, 2], [2, 2]]


def test_the_object_of_the_batch_stays_as_it_is() -> None:
    batch = padded(samples()[:4])
    (first, _), (second, _) = (part for part, _ in split_batch(batch, 2))
    assert [len(one.values) for one in (first, second, batch[0])] == [2, 2, 4]
    assert type(first) is Padded
