"""Seeds that a step gives numpy's and Python's generators are the user's, whatever units draw."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from tests.unit.split.nets import Block, Net, batch_of, seeded
from tests.unit.split.pipe import alone, assert_same, piped

CUTS = (["layers.1"], ["layers.0", "layers.2"], ["layers.1", "head"])


class Draws(Block):
    """Scales its output by what numpy and Python draw."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + float(numpy.random.rand()) + random.random()
        result: Tensor = super().forward(x) * scale
        return result


class Seeds(Net):
    """Seeds both at the start of the step; code between the units draws, too."""

    def __init__(self) -> None:
        super().__init__(Draws)

    def body(self, h: Tensor) -> Tensor:
        numpy.random.seed(7)
        random.seed(8)
        for layer in self.layers:
            h = layer(h) + float(numpy.random.rand()) * h + random.random()
        return h


class SeedsBetween(Net):
    """Seeds one of them after the second unit."""

    def __init__(self) -> None:
        super().__init__(Draws)

    def body(self, h: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number >= 2:
                numpy.random.seed(number)
                random.seed(number)
            h = layer(h) * (1 + float(numpy.random.rand())) if number >= 2 else h.sin()
        return h


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "+".join(cut))
@pytest.mark.parametrize("kind", [Seeds, SeedsBetween])
def test_host_numbers_are_those_of_the_seed(kind: Any, cut: list[str]) -> None:
    module = seeded(kind)
    expected = alone(module, batch_of())
    numpy.random.seed(0)
    random.seed(0)
    state = numpy.random.get_state()[1].tolist(), random.getstate()
    torchs = torch.get_rng_state()
    found = piped(module, batch_of(), stages=len(cut) + 1, how=cut)
    assert_same(found, expected)
    assert (numpy.random.get_state()[1].tolist(), random.getstate()) == state
    assert torch.equal(torch.get_rng_state(), torchs)
