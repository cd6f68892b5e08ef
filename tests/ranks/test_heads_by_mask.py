"""Heads whose losses are asked for where the batch has samples of theirs: micro-batches may have none."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import trainer, weights

Ranks = Callable[[int], Pool]
APART = "have decided differently"


def loader() -> Any:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=made, dtype=torch.float64)
    y = torch.randn(24, 3, generator=made, dtype=torch.float64)
    return DataLoader(TensorDataset(x, y, torch.randint(0, 3, (24,), generator=made)), batch_size=8)


class Heads(pl.LightningModule):
    """Three heads on a common trunk; a sample is of one of three tasks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
        self.heads = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)]).double()

    def parts(self, batch: Any) -> Iterator[Tensor]:
        x, y, task = batch
        found = self.net(x)
        for number, head in enumerate(self.heads):
            of_task = task == number
            if of_task.any():
                yield self.part(number, head(found), y, of_task)

    def part(self, number: int, output: Tensor, y: Tensor, of_task: Tensor) -> Tensor:
        loss = F.mse_loss(output[of_task], y[of_task])
        self.log(f"{number}", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(self.parts(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("all", sum(self.parts(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = train_dataloader


class Divided(Heads):
    def part(self, number: int, output: Tensor, y: Tensor, of_task: Tensor) -> Tensor:
        loss = ((output - y) ** 2).mean(1)[of_task].sum()
        self.log(f"{number}", loss / of_task.sum())
        return loss / of_task.sum()


class Mean(Heads):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.stack(list(self.parts(batch))).mean()


class ByTheBatch(Heads):
    """Its second loss is of all samples, where the batch has a task."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, task = batch
        found = self.net(x)
        loss = F.mse_loss(self.heads[0](found), y)
        return loss + F.mse_loss(self.heads[1](found), y) if (task > 1).any() else loss


KINDS = {kind.__name__: kind for kind in (Heads, Divided, Mean, ByTheBatch)}


def fitted(pipeline: dict[str, Any] | None, kind: str) -> tuple[dict[str, Tensor], dict[str, float], bool]:
    module, run = KINDS[kind](), trainer(pipeline)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(module)
    logged = {name: float(value) for name, value in run.logged_metrics.items()}
    return weights(module), logged, any(APART in str(one.message) for one in said)


@pytest.mark.parametrize("kind", ["Divided", "Mean", "Heads"])
def test_micro_batches_without_samples_of_a_task_are_nothing_to_warn_of(ranks: Ranks, kind: str) -> None:
    expected, logged, _ = fitted(None, kind)
    found = [fitted({"stages": 1, "num_microbatches": number}, kind) for number in (2, 4)]
    found += ranks(2)(fitted, {"stages": 2, "num_microbatches": 4}, kind, group=False)
    for own, own_logged, is_warned in found:
        assert not is_warned
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)
        assert own_logged == pytest.approx(logged, rel=1e-6)


def test_what_the_batch_decides_for_all_of_its_samples_is_decided_for_each_micro_batch(ranks: Ranks) -> None:
    expected, *_ = fitted(None, "ByTheBatch")
    found = [fitted({"stages": 1, "num_microbatches": 4}, "ByTheBatch")]
    found += ranks(2)(fitted, {"stages": 2, "num_microbatches": 4}, "ByTheBatch", group=False)
    for own, _, is_warned in found:
        assert not is_warned
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)


class Guided(pl.LightningModule):
    """Logs a mean of some samples if there are any, and then one of all; classes are dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.first = nn.Embedding(5, 8).double(), nn.Linear(6, 8).double()
        self.last = nn.Linear(8, 6).double()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, chosen, drop, late = batch
        found = self.last(self.first(x) + self.classes(torch.where(drop, 4, chosen)))
        losses = (found**2).mean(1)
        if late.any():
            self.log("late", losses[late].mean(), batch_size=int(late.sum()))
        self.log("all", losses.mean())

    def val_dataloader(self) -> Any:
        made = torch.Generator().manual_seed(4)
        x = torch.randn(12, 6, generator=made, dtype=torch.float64) * torch.arange(1, 13)[:, None]
        drop = torch.rand(12, generator=made) < 0.3
        late = torch.zeros(12, dtype=torch.bool).index_fill(0, torch.tensor([0, 7]), True)
        data = TensorDataset(x, torch.randint(4, (12,), generator=made), drop, late)
        return DataLoader(data, batch_size=6)


def test_a_plain_mean_after_one_that_a_condition_logs_is_its_own() -> None:
    found = []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found += trainer(pipeline).validate(Guided(), verbose=False)
    assert found[1] == pytest.approx(found[0], rel=1e-9)
