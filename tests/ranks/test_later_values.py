"""A place that is a constant in some batches and a number of the model in others: one device's on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Later(Regression):
    """What hooks find is noted after each batch, and makes the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Any = 1.0
        self.found: list[float] = []

    def note(self, loss: Tensor, batch_idx: int) -> None:
        """What the case keeps of a step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.note(loss, batch_idx)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(round(float(self.now), 8))
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.02 / (1 + abs(float(self.now)))


class AfterTheFirst(Later):
    def note(self, loss: Tensor, batch_idx: int) -> None:
        self.now = loss.item() if self.global_step > 0 else 1.0


class EverySecond(Later):
    def note(self, loss: Tensor, batch_idx: int) -> None:
        self.now = float(loss.detach().numpy()) if batch_idx % 2 else 0.0


class AsATensor(Later):
    def note(self, loss: Tensor, batch_idx: int) -> None:
        self.now = loss.detach() if self.current_epoch > 0 else torch.zeros(())


class InAList(Later):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[float] = []

    def note(self, loss: Tensor, batch_idx: int) -> None:
        self.kept.append(loss.item() if self.global_step > 0 else 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.now = sum(self.kept) / len(self.kept)
        super().on_train_batch_end(outputs, batch, batch_idx)


class ByItsStep(Later):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, float] = {}

    def note(self, loss: Tensor, batch_idx: int) -> None:
        self.kept[self.global_step] = loss.item() if self.global_step > 1 else 1.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.now = self.kept[max(self.kept)]
        super().on_train_batch_end(outputs, batch, batch_idx)


class ByACounter(Later):
    """Which goes on after a number was read, in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.count % 2:
            self.now = loss.item()
        self.count += 1
        return loss * (1 + self.count % 3)


class InValidation(Later):
    """But for the check before training."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.now = loss.item() if not self.trainer.sanity_checking else 0.0
        self.log("val", loss)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.found.append(round(float(self.now), 8))


def fit(kind: type[Later], pipeline: dict[str, Any] | None) -> Any:
    module, run = kind(), trainer(pipeline)
    run.fit(module, loader(), loader(seed=4))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), module.found


CASES = [AfterTheFirst, EverySecond, AsATensor, InAList, ByItsStep, ByACounter, InValidation]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", CASES)
def test_hooks_find_what_one_device_keeps(ranks: Ranks, kind: type[Later], stages: int) -> None:
    expected, found = fit(kind, None)
    for result, theirs in ranks(stages)(fit, kind, {"stages": stages, "num_microbatches": 2}, group=False):
        assert_same(result, expected)
        assert theirs == found
