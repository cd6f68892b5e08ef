"""Tensors that a hook makes and a step writes in place: every rank has what one device has in them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import TARGETS, Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Stores(Regression):
    """Writes what the network gives into a part of a tensor that the epoch's begin makes."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_validation_epoch_start(self) -> None:
        self.stored = torch.zeros(10, TARGETS, dtype=torch.float64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.stored[batch_idx * 4 : batch_idx * 4 + len(batch[0])] = self.net(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("median", self.stored.median())


class OfClasses(Stores):
    """The same where the output is let go at once, and of classes."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        begin = batch_idx * 4
        self.stored[begin : begin + len(batch[0]), 0] = self.net(batch[0]).argmax(1).double()
        self.stored[begin : begin + len(batch[0]), 1].copy_(self.net(batch[0])[:, 1])


class Counts(Stores):
    """A sum that a hook sets the learning rate by."""

    def on_train_epoch_start(self) -> None:
        self.sums = torch.zeros(TARGETS, dtype=torch.float64)
        self.counts = torch.zeros(TARGETS, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        self.sums += outputs.detach().sum(0)
        self.counts.index_add_(0, outputs.argmax(1), torch.ones(len(outputs), dtype=torch.float64))
        return nn.functional.mse_loss(outputs, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        (group,) = self.optimizers().param_groups
        group["lr"] = 0.1 / (1 + float(self.sums.abs().sum()) + float(self.counts[0]))
        self.rates.append(group["lr"])


class OnLayer(Counts):
    """The same of a tensor that a layer holds."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.net[0].sums = torch.zeros(TARGETS, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        self.net[0].sums += outputs.detach().sum(0)
        return nn.functional.mse_loss(outputs, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.sums = self.net[0].sums
        super().on_train_batch_end(*args)


KINDS = {kind.__name__: kind for kind in (Stores, OfClasses, Counts, OnLayer)}


def left(pipeline: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    module, run = KINDS[kind](), trainer(pipeline)
    run.fit(module, loader(), loader(10, 4, seed=4))
    found = {name: value.detach() for name, value in module.named_parameters()}
    sums = getattr(module, "sums", torch.zeros(TARGETS, dtype=torch.float64))
    rates = torch.tensor(module.rates, dtype=torch.float64)
    return {**found, "stored": module.stored, "sums": sums, "rates": rates} | {
        "median": float(run.callback_metrics["median"])
    }


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_hooks_make_are_written_on_every_rank(ranks: Ranks, kind: str) -> None:
    expected = left(None, kind)
    one_rank = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2}
    two_ranks = {"stages": 2, "num_microbatches": 2}
    assert expected["stored"].abs().sum() > 0
    for found in (left(one_rank, kind), *ranks(2)(left, two_ranks, kind, group=False)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
