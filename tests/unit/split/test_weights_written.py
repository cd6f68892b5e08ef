"""A step that writes weights: each stage writes those that it has, and needs no others for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.split.nets import Net, batch_of, seeded
from tests.unit.split.pipe import alone, assert_same, piped


class ClampedInPlace(Net):
    """A critic's weights, before the forward."""

    def change(self, weight: nn.Parameter) -> None:
        weight.data.clamp_(-0.1, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for weight in self.parameters():
            self.change(weight)
        return super().training_step(batch, batch_idx)


class Clamped(ClampedInPlace):
    def change(self, weight: nn.Parameter) -> None:
        weight.data = weight.data.clamp(-0.1, 0.1)


class ClampedWithoutGradients(ClampedInPlace):
    @torch.no_grad()
    def change(self, weight: nn.Parameter) -> None:
        weight.clamp_(-0.1, 0.1)


class ClampedByTheBatch(ClampedInPlace):
    """By something of it that no unit has a part in."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for weight in self.parameters():
            weight.data.clamp_(-0.1 * len(batch["x"]), 0.1)
        return Net.training_step(self, batch, batch_idx)


class ClampedInPlaceAfterwards(ClampedInPlace):
    """Before the backward, which has the weights as they are then."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = Net.training_step(self, batch, batch_idx)
        for weight in self.parameters():
            self.change(weight)
        return loss


class ClampedAfterwards(ClampedInPlaceAfterwards, Clamped):
    pass


class NormalisedBetween(Net):
    """Where units have run and others have not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.layers[0](self.emb(batch["x"]))
        for layer in self.layers:
            layer.m.weight.data.copy_(F.normalize(layer.m.weight.data))
        return self.loss(self.body(h), batch)


WAYS = [
    ClampedInPlace, Clamped, ClampedWithoutGradients, ClampedByTheBatch, ClampedInPlaceAfterwards, ClampedAfterwards,
    NormalisedBetween,
]  # fmt: skip


def _weights(outcome: Any) -> dict[str, Tensor]:
    root = outcome.module or outcome.splits[0].root
    return {name: weight.detach() for name, weight in root.named_parameters()}


def _assert_weights_are_those_of(found: Any, expected: Any) -> None:
    theirs = _weights(expected)
    for split in found.splits:
        for name, weight in split.owned_parameters():
            torch.testing.assert_close(weight.detach(), theirs[name], rtol=0.0, atol=0.0, msg=name)


@pytest.mark.parametrize("kind", WAYS)
def test_each_stage_writes_its_own_weights(kind: Callable[[], Any]) -> None:
    module = seeded(kind)
    expected = alone(module, batch_of(), num_microbatches=1, steps=2)
    for options in ({}, {"split_backward": True}):
        found = piped(module, batch_of(), 3, 1, steps=2, **options)
        assert_same(found, expected)
        _assert_weights_are_those_of(found, expected)
        assert [len(list(split.owned_parameters())) for split in found.splits] == [4, 4, 4]


@pytest.mark.parametrize("kind", WAYS)
def test_each_micro_batch_begins_with_the_weights_of_the_batch(kind: Callable[[], Any]) -> None:
    module = seeded(kind)
    expected = piped(module, batch_of(), 1, 2, steps=2)
    found = piped(module, batch_of(), 3, 2, steps=2)
    assert_same(found, expected)
    _assert_weights_are_those_of(found, expected)


class MadeOfTheNext(Net):
    """Each layer's weight becomes more like the next one's, which only its stage is to have beside it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for one, other in zip(self.layers[:2], self.layers[1:3], strict=True):
            one.m.weight.data = one.m.weight.data * 0.5 + other.m.weight.data * 0.5
        return super().training_step(batch, batch_idx)


def test_a_stage_has_beside_its_weights_those_that_they_are_made_of() -> None:
    module = seeded(MadeOfTheNext)
    expected = alone(module, batch_of(), num_microbatches=1, steps=2)
    found = piped(module, batch_of(), 3, 1, steps=2, how=("layers.1", "layers.3"))
    assert_same(found, expected)
    _assert_weights_are_those_of(found, expected)
    names = [{name for name, _ in split.owned_parameters()} for split in found.splits]
    assert "layers.1.m.weight" in names[0], "of which the first is made"
    assert "layers.2.m.weight" in names[0], "of which that is made, where it stands"
    assert names[2] == {"layers.3.m.weight", "layers.3.m.bias", "head.weight", "head.bias"}
