"""A head and a loss for each task, where a micro-batch may have no samples of one; and what else decides."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, trainer, weights

Ranks = Callable[[int], Pool]


def in_place(losses: list[Tensor]) -> Tensor:
    total = losses[0].clone()
    for one in losses[1:]:
        total += one
    return total


def from_zeros(losses: list[Tensor]) -> Tensor:
    total = losses[0].new_zeros(())
    for one in losses:
        total = total + one
    return total


MADE: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "in place": in_place,
    "from zeros": from_zeros,
    "scaled": lambda losses: sum(losses) * 0.5,  # type: ignore[return-value]
    "stacked": lambda losses: torch.stack(losses).sum(),
    "mean of those there": lambda losses: sum(losses) / len(losses),  # type: ignore[return-value]
    "stacked mean": lambda losses: torch.stack(losses).mean(),
    "summed": sum,  # type: ignore[dict-item]
}


class Tasks(Regression):
    def __init__(self, made: str, targets: int, tasks: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.made, self.heads = made, nn.ModuleList(nn.Linear(8, targets) for _ in range(tasks)).double()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, task = batch
        h, losses = self.net(x), []
        for number, head in enumerate(self.heads):
            own = task == number
            if own.any():
                losses.append(mse_loss(head(h[own]), y[own]))
        loss = MADE[self.made](losses)
        self.log("loss", loss)
        return loss


def fitted(pipeline: dict[str, Any] | None, made: str, targets: int, tasks: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(24, size, generator=generator, dtype=torch.float64) for size in (6, targets))
    data = TensorDataset(x, y, torch.randint(0, tasks, (24,), generator=generator))
    module, run = Tasks(made, targets, tasks), trainer(pipeline, max_epochs=2, limit_val_batches=0)
    run.fit(module, DataLoader(data, batch_size=8))
    return weights(module), {key: float(value) for key, value in run.callback_metrics.items()}


@pytest.mark.filterwarnings("error:Using a target size")  # of shapes that nothing of the user's has
@pytest.mark.parametrize(("targets", "tasks"), [(3, 2), (5, 4)])
@pytest.mark.parametrize("made", MADE)
def test_a_loss_for_each_task_that_is_there(ranks: Ranks, made: str, targets: int, tasks: int) -> None:
    expected = fitted(None, made, targets, tasks)
    pipeline = {"stages": 2, "num_microbatches": 2}
    for found in ranks(2)(fitted, pipeline, made, targets, tasks, group=False):
        assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:training_step decides by what is in the batch")
@pytest.mark.parametrize(("targets", "tasks"), [(3, 2), (5, 4)])
@pytest.mark.parametrize("made", MADE)
def test_micro_batches_of_one_stage_make_a_loss_for_each_task_that_is_there(
    made: str, targets: int, tasks: int
) -> None:
    expected = fitted(None, made, targets, tasks)
    assert_same(fitted({"stages": 1, "num_microbatches": 4}, made, targets, tasks), expected)


class Halved(Tasks):
    """Divides the loss of the first task where there is no other: by what the batch divides another by."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, task = batch
        h, (first, second) = self.net(x), self.heads
        loss = mse_loss(first(h[task == 0]), y[task == 0]) if (task == 0).any() else 0.0 * h.sum()
        own = task == 1
        return loss + mse_loss(second(h[own]), y[own]) / 3.0 if own.any() else loss / 2.0


def fitted_halved(pipeline: dict[str, Any] | None) -> Any:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (6, 5))
    data = TensorDataset(x, y, torch.tensor([0, 0, 0, 1, 0, 0, 0, 0]))
    module, run = Halved("summed", 5, 2), trainer(pipeline, max_epochs=2, limit_val_batches=0)
    run.fit(module, DataLoader(data, batch_size=8))
    return weights(module), {key: float(value) for key, value in run.callback_metrics.items()}


@pytest.mark.parametrize("parts", [2, 4])
def test_a_loss_that_is_made_otherwise_without_a_task_is_made_as_the_batch_has_it(parts: int) -> None:
    assert_same(fitted_halved({"stages": 1, "num_microbatches": parts}), fitted_halved(None))


class Decides(Regression):
    """Adds a part to its loss where a number decides."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.decided(self.net(batch[0]), batch[1])

    def decided(self, out: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


class BySamples(Decides):
    def decided(self, out: Tensor, y: Tensor) -> Tensor:
        loss = mse_loss(out, y)
        if len(y) > 4:
            loss = loss + 0.01 * sum(p.square().sum() for p in self.net.parameters())
        return loss


class ByFlags(Decides):
    """Of losses that are alike in the first batches."""

    def decided(self, out: Tensor, y: Tensor) -> Tensor:
        one, other = mse_loss(out[:, 0], y[:, 0]), mse_loss(out[:, 1], y[:, 1])
        return one if self.global_step < 4 or bool(one > other) else other


class Hits(Decides):
    """Counts in a loop over samples what no loss is made of."""

    def decided(self, out: Tensor, y: Tensor) -> Tensor:
        hits = 0
        for guess, truth in zip(out.argmax(-1), y.argmax(-1), strict=True):
            if guess == truth:
                hits += 1
        return mse_loss(out, y)


def said(pipeline: dict[str, Any] | None, kind: type[Decides]) -> list[str]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(64, size, generator=generator, dtype=torch.float64) for size in (6, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(pipeline, max_epochs=1, limit_val_batches=0)
        run.fit(kind(), DataLoader(TensorDataset(x, y), batch_size=8))
    return [str(one.message) for one in caught if "training_step" in str(one.message)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (BySamples, "calls more functions for the batch as a whole"),
        (ByFlags, "decides by what layers compute"),
    ],
)
def test_what_decides_otherwise_for_a_micro_batch_is_told(
    ranks: Ranks, kind: type[Decides], words: str
) -> None:
    every = ranks(2)(said, {"stages": 2, "num_microbatches": 2}, kind, group=False)
    told = [line for lines in every for line in lines]
    assert any(words in line for line in told), told


def test_what_is_decided_beside_the_loss_is_not_told(ranks: Ranks) -> None:
    every = ranks(2)(said, {"stages": 2, "num_microbatches": 2}, Hits, group=False)
    assert [line for lines in every for line in lines] == []
