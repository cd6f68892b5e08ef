"""What a step begins to log, to add to its loss or to mix in a later epoch."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_pipeline.errors import PlaceholderError
from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Later(Regression):
    """Has two layers, and does something between or after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.between(self.net(batch[0]).tanh())
        loss = mse_loss(self.head(hidden), batch[1])
        return self.after(hidden, loss) if self.current_epoch else loss

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def after(self, hidden: Tensor, loss: Tensor) -> Any:
        return loss


class Logs(Later):
    def after(self, hidden: Tensor, loss: Tensor) -> Any:
        self.log("size", hidden.abs().mean())
        return loss


class Mixes(Later):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0) if self.current_epoch else 1.0 * hidden


class Penalty(Later):
    def after(self, hidden: Tensor, loss: Tensor) -> Any:
        return loss + 0.1 * self.net.weight.abs().sum()


class Skips(Later):
    """Returns no loss in the first epoch, and then one that is divided by weights of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        of_samples = batch[0][:, 0].sigmoid()
        errors = (self.head(self.net(batch[0]).tanh()) - batch[1]).square().mean(1)
        return (errors * of_samples).sum() / of_samples.sum() if self.current_epoch else None


def fitted(pipeline: dict[str, Any] | None, kind: type[Later]) -> tuple[Any, list[str]]:
    module, run = kind(), trainer(pipeline, max_epochs=2, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, loader())
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    said = [
        str(one.message)
        for one in caught
        if "training_step" in str(one.message) or "self.log" in str(one.message)
    ]
    return (weights(module), logged), said


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [Logs, Skips])
def test_what_begins_later_is_one_devices(ranks: Ranks, kind: type[Later], stages: int) -> None:
    expected, _ = fitted(None, kind)
    for found, said in ranks(stages)(fitted, {"stages": stages, "num_microbatches": 2}, kind, group=False):
        assert_same(found, expected)
        assert [line for line in said if "returned" not in line] == []  # no loss, in the first epoch


def test_samples_that_are_mixed_later_are_told(ranks: Ranks) -> None:
    every = ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, Mixes, group=False)
    assert any("mixes" in line for _, said in every for line in said)


def test_weights_of_other_stages_that_a_step_begins_to_read_are_refused_with_a_way_out(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=rf"{PlaceholderError.__name__}.*read them in every batch"):
        ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, Penalty, group=False)
