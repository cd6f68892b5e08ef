"""What a step leaves behind in some of its batches only, and weights that it writes in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Late(Regression):
    """The second batch, and the second loader, leave behind what the first ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.number, self.counts = 0, dict[str, int]()
        self.register_buffer("batches", torch.zeros(()))
        self.means: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        if batch_idx == 1:
            self.losses.append(loss.detach())
            self.number += 1
            self.counts["late"] = self.counts.get("late", 0) + 1
            self.batches += 1
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        mean = self.net(batch[0]).mean()
        if dataloader_idx == 1:
            self.means.append(mean)


class Decayed(Regression):
    """Each step writes weights in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.net.parameters():
            parameter.data.mul_(0.95)
        return F.mse_loss(self.net(batch[0]), batch[1])


def left(pipeline: dict[str, Any] | None) -> tuple[Any, ...]:
    module = Late()
    trainer(pipeline, max_epochs=2).fit(module, loader(24), [loader(8), loader(10, seed=4)])
    losses, means = ([float(value) for value in values] for values in (module.losses, module.means))
    return losses, means, float(module.batches), module.number, module.counts


@pytest.mark.parametrize(
    "pipeline", [{"stages": 2, "num_microbatches": 4}, {"stages": 3, "num_microbatches": 1}]
)
def test_effects_of_later_batches_are_those_of_one_device(ranks: Ranks, pipeline: dict[str, Any]) -> None:
    expected = left(None)
    assert expected[2:] == (2.0, 2, {"late": 2})
    for losses, means, *rest in ranks(pipeline["stages"])(left, pipeline):
        assert rest == list(expected[2:])
        assert losses == pytest.approx(expected[0])
        assert means == pytest.approx(expected[1])


def decay(pipeline: dict[str, Any] | None) -> dict[str, Tensor]:
    module = Decayed()
    trainer(pipeline, max_epochs=1).fit(module, loader(24))
    return weights(module)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_weights_written_in_place_are_written_once_a_batch(ranks: Ranks, num_microbatches: int) -> None:
    expected = decay(None)
    for found in ranks(2)(decay, {"stages": 2, "num_microbatches": num_microbatches}):
        assert_same((found, {}), (expected, {}))
