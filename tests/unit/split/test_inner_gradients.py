"""Gradients in the step, weights that the step moves, and a module called with other weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_pipeline.errors import SplitError
from tests.unit.split.pipe import Module, alone, assert_same, piped

pytestmark = pytest.mark.usefixtures("float64")


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = layers()

    def loss(self, x: Tensor) -> Tensor:
        return self.net(x).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)


def batch() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Penalty(Net):
    """As for WGAN-GP, in the step."""

    def loss(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        found = self.net(x)
        (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return found.mean() + (gradient.norm(dim=1) - 1).pow(2).mean()


class Critic(nn.Module):
    """The same in a module that returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        found = self.layers(x)
        (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return found, gradient


class PenaltyInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.critic = Critic()

    def loss(self, x: Tensor) -> Tensor:
        found, gradient = self.critic(self.net(x))
        return found.mean() + (gradient.norm(dim=1) - 1).pow(2).mean()


def test_a_gradient_penalty_over_units_is_refused_with_what_works() -> None:
    with pytest.raises(SplitError, match=r"(?s)taken inside the step .*one module, .*units=\['<its name>'\]"):
        piped(Penalty(), batch(), 2, 2)


@pytest.mark.parametrize("split_backward", [False, True])
def test_a_gradient_penalty_in_a_module_that_is_kept_whole(split_backward: bool) -> None:
    mine = piped(PenaltyInside(), batch(), 2, 3, units=["critic"], split_backward=split_backward)
    assert_same(mine, alone(PenaltyInside(), batch(), 3))


class OtherWeights(Net):
    """The module that is spread, called with weights that the step makes of its own."""

    def loss(self, x: Tensor) -> Tensor:
        scaled = {name: weight * 0.9 for name, weight in self.net.named_parameters()}
        return functional_call(self.net, scaled, (x,)).pow(2).mean() + self.net(x).mean()


def test_functional_call_of_a_module_over_stages() -> None:
    for stages in (2, 3):
        assert_same(piped(OtherWeights(), batch(), stages, 2), alone(OtherWeights(), batch(), 2))


class Moves(Net):
    """At the end of the step weights of one stage become those of another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.other = how, layers()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) * self.other(batch)).pow(2).mean()
        first, last = self.net[0][0].weight, self.net[3][0].weight
        with torch.no_grad():
            if self.how == "swap":
                first.data, last.data = last.data, first.data
            elif self.how == "copy":
                first.copy_(last * 0.5)
            else:
                first.data = last.data * 0.5
        return loss


@pytest.mark.parametrize("how", ["swap", "copy", "data"])
@pytest.mark.parametrize(("stages", "number"), [(2, 1), (2, 3)])
def test_weights_that_the_end_of_a_step_moves_over_stages(how: str, stages: int, number: int) -> None:
    mine: Any = piped(Moves(how), batch(), stages, number, steps=3)
    theirs = alone(Moves(how), batch(), 1, steps=3)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-10, atol=1e-10, msg=name)
