"""Running means and metrics that a step keeps, resets and asks: one device's, at the end and in hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError
from torchmetrics.wrappers import MinMaxMetric, MultitaskWrapper

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Meter:
    """A running mean, as training scripts have had it for years."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val: Any = 0
        self.avg: Any = 0
        self.sum: Any = 0
        self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Metered(Regression):
    """Has a meter, and lowers its rate by what that says."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.meter.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("average", self.meter.avg)
        for group in self.optimizers().param_groups:
            group["lr"] *= float(self.meter.avg)
        self.meter.reset()


class Totals(Metered):
    """The same without an object."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0.0
        self.number = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.total += loss.detach()
        self.number += 1
        self.meter.avg = self.total / self.number
        return loss


class Numbers(Metered):
    """Gives the meter Python's numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.meter.update(loss.item(), len(batch[0]))
        return loss


class ResetAtTimes(Regression):
    """Asks a metric in each batch, and begins it anew in some."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanSquaredError()

    def is_reset(self, batch_idx: int) -> bool:
        return batch_idx % 2 == 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.net(batch[0])
        if self.is_reset(batch_idx):
            self.metric.reset()
        self.metric.update(found, batch[1])
        self.log("error", self.metric.compute())
        return F.mse_loss(found, batch[1])


class ResetAtFirst(ResetAtTimes):
    def is_reset(self, batch_idx: int) -> bool:
        return batch_idx == 0


class BySample(Regression):
    """Each sample is given to a metric of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleList([MeanMetric() for _ in range(3)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.mse_loss(self.net(batch[0]), batch[1], reduction="none").mean(1)
        kinds = (batch[0][:, 0] * 2).round().abs().clamp(max=2).long().tolist()
        for kind, loss in zip(kinds, losses.detach(), strict=True):
            self.means[kind].update(loss)
        return losses.mean()

    def on_train_epoch_end(self) -> None:
        for kind, mean in enumerate(self.means):
            self.log(f"kind {kind}", mean.compute())
            mean.reset()


class OfTasks(Regression):
    """A metric gives a dictionary, after which the step keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.of_tasks = MultitaskWrapper({"error": MeanSquaredError(), "mean": MeanAbsoluteError()})
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found, target = self.net(batch[0]), batch[1]
        told = self.of_tasks({"error": found, "mean": found}, {"error": target, "mean": target})
        self.log_dict({f"of {name}": value for name, value in told.items()})
        self.kept.append(found.detach())
        return F.mse_loss(found, target)

    def on_train_epoch_end(self) -> None:
        self.of_tasks.reset()
        self.log("spread", torch.cat(self.kept).std())
        self.kept.clear()


class OfOutputs(Regression):
    """A metric gives a number for each output, and one its extremes."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.extremes = MeanSquaredError(num_outputs=3), MinMaxMetric(MeanMetric())
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.net(batch[0])
        each = self.each(found, batch[1])
        self.log_dict({"first": each[0], "second": each[1]})
        loss = F.mse_loss(found, batch[1])
        self.extremes.update(loss.detach())
        self.kept.append(found.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("max", self.extremes.compute()["max"])
        self.log("spread", torch.cat(self.kept).std())
        self.kept.clear()


class Counting(MeanMetric):
    """Counts its updates in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.calls += 1
        self.seen.append(self.calls)


class ByCalls(Regression):
    """Lowers its rate by what a metric has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Counting()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.mean.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + self.mean.calls + sum(self.mean.seen))


KINDS: dict[str, Any] = {
    one.__name__: one
    for one in (
        ByCalls, OfTasks, OfOutputs, Metered, Totals, Numbers, ResetAtTimes, ResetAtFirst, BySample,
    )
}  # fmt: skip


def fit_metered(pipeline: dict[str, Any] | None, kind: str) -> Any:
    module, run = KINDS[kind](), trainer(pipeline, max_epochs=2)
    run.fit(module, loader(32))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_measures_is_what_one_device_does(ranks: Ranks, kind: str) -> None:
    expected = fit_metered(None, kind)
    assert_same(fit_metered({"stages": 1, "num_microbatches": 2}, kind), expected, 1e-6)
    for found in ranks(2)(fit_metered, {"stages": 2, "num_microbatches": 2}, kind):
        assert_same(found, expected, 1e-6)
