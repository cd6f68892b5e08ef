"""What hooks find in `optimizer.state`, where entries come and go after the first step: as on one device."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Notes(Regression):
    """After each batch it notes what its optimizer keeps, and takes the rate from how much that is."""

    kept: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        self.kept.append((len(optimizer.state), [names[id(one)] for one in optimizer.state]))
        self.kept.append([name for name, one in self.named_parameters() if one in optimizer.state])
        for one, states in optimizer.state.items():
            self.kept.append(
                (names[id(one)], {key: round(float(value.sum()), 8) for key, value in states.items()})
            )
        self.kept.append(sorted(optimizer.state_dict()["state"]))
        self.kept.append(len(copy.copy(optimizer.state)))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + len(optimizer.state))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class Clears(Notes):
    """All of it, ahead of an epoch; then a part of it."""

    def on_train_epoch_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        optimizer.state.clear()
        self.kept.append((len(optimizer.state), len(optimizer.state_dict()["state"])))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for parameter in list(self.net.parameters())[1:4]:
                del self.trainer.optimizers[0].state[parameter]


class Resets(Notes):
    """Entries are emptied, and then there is another dictionary."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if batch_idx == 1:
            for parameter in self.parameters():
                optimizer.state[parameter] = {}
        if batch_idx == 2:
            optimizer.state = defaultdict(dict)


class Thaws(Notes):
    """A layer is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    @property
    def first(self) -> nn.Module:
        return next(iter(self.net))

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch == 1)


class Exchanges(Notes):
    """Another optimizer takes the place of the first."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)]


class ByHand(Notes):
    """Manual optimization, and layers without a gradient in the first step; the step itself reads."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        first = next(iter(self.net))
        loss = self.loss(batch) if self.global_step else first(batch[0]).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.kept.append(len(optimizer.state))
        self.log("few", float(len(optimizer.state) < 3))


def fit(kind: type[Notes], pipeline: dict[str, Any] | None) -> Any:
    module, run = kind(), trainer(pipeline)
    run.fit(module, loader(), loader(seed=4))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    assert type(run.optimizers[0].state) is defaultdict
    return (weights(module), logs), module.kept


@pytest.mark.parametrize("kind", [Clears, Resets, Thaws, Exchanges, ByHand])
def test_hooks_see_what_one_device_keeps(ranks: Ranks, kind: type[Notes]) -> None:
    expected, kept = fit(kind, None)
    for found, theirs in ranks(2)(fit, kind, {"stages": 2, "num_microbatches": 2}, group=False):
        assert_same(found, expected)
        assert theirs == kept
