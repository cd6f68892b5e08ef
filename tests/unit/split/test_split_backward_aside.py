"""The split backward steps aside where a gradient is taken inside a unit, or a transform runs there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.split.nets import WIDTH, Net, assert_works, batch_of, seeded
from tests.unit.split.pipe import alone, assert_same, piped
from tests.whole import chosen


class Layer(nn.Module):
    """A linear layer, a product with a bias, a convolution; `energy` of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Conv1d(1, 1, 3, padding=1)
        self.w, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def layers(self, x: Tensor) -> Tensor:
        return torch.addmm(self.b, self.c(self.m(x).tanh().unsqueeze(-2)).squeeze(-2).sin(), self.w)

    def energy(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).sum()


class FirstOrder(Layer):
    """Forces, without a graph of their own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(y), y)
        return self.layers(x) + force


class SecondOrder(Layer):
    """Forces that are trained."""

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return self.layers(x) + force


class ByWeights(Layer):
    """One inner step of gradient descent."""

    def forward(self, x: Tensor) -> Tensor:
        names, weights = zip(*self.named_parameters(), strict=True)
        gradients = torch.autograd.grad(self.energy(x), weights, create_graph=True)
        faster = {n: w - 0.1 * g for n, w, g in zip(names, weights, gradients, strict=True)}
        return torch.func.functional_call(self.Layers(self), faster, (x,))

    class Layers(nn.Module):
        def __init__(self, layer: Layer) -> None:
            super().__init__()
            self.m, self.c, self.w, self.b = layer.m, layer.c, layer.w, layer.b

        forward = Layer.layers


class ByTheWeightsOfOneLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(self.energy(x), self.m.weight, create_graph=True)
        return self.layers(x) * gradient.pow(2).sum()


class InsideACheckpoint(SecondOrder):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class InsideABackward(Layer):
    """A function whose backward takes a gradient of layers, whose weights it also trains."""

    class Penalised(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
            ctx.save_for_backward(x)
            ctx.layer = layer
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(ctx.layer.energy(y), y)
            return gradients[0] + force, None

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.Penalised.apply(x, self))


class Vmapped(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.m(row).tanh())(x) + self.layers(x)


class Jacobians(Layer):
    def forward(self, x: Tensor) -> Tensor:
        _, tangent = torch.func.jvp(self.layers, (x,), (torch.ones_like(x),))
        jacobians = torch.vmap(torch.func.jacrev(lambda row: self.layers(row[None])[0]))(x)
        return self.layers(x) + tangent + jacobians.sum(1)


class Dual(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(self.layers(dual)).tangent
        return self.layers(x) + tangent


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.m = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x.detach() * 2).long().clamp(0, 4)[:, 0])
        (gradient,) = torch.autograd.grad(self.m(rows).pow(2).sum(), self.table.weight, create_graph=True)
        return self.m(x * rows) * gradient.pow(2).sum()


KINDS: list[Callable[[], nn.Module]] = [
    FirstOrder, SecondOrder, ByWeights, ByTheWeightsOfOneLayer, InsideACheckpoint, InsideABackward, Vmapped,
    Jacobians, Dual, Table,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_device(kind: Callable[[], nn.Module]) -> None:
    module = seeded(lambda: Net(kind))
    expected = alone(module, batch_of())
    for options in chosen([{"stages": 2}, {"stages": 3}, {"stages": 4, "ranks": [[0, 3], [1, 2]]}], 2):
        assert_same(piped(module, batch_of(), split_backward=True, **options), expected)


class Twice(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h) + F.linear(h, layer.m.weight)
        return h


def test_weights_that_glue_uses_too_are_trained_by_both():
    assert_works(Twice, batch_of())
    module = seeded(Twice)
    assert_same(piped(module, batch_of(), split_backward=True), alone(module, batch_of()))


class Plain(Layer):
    forward = Layer.layers


class MovedAfterwards(Net):
    """Weights get other memory after the forward that uses them: a linear layer's backward has the old one."""

    def __init__(self):
        super().__init__(Plain)

    def training_step(self, batch, batch_idx):
        h = self.layers[0](self.emb(batch["x"]))
        loss = self.loss(self.body(h), batch)
        for weight in (self.emb.weight, *self.layers[0].parameters()):
            weight.data = weight.data * 0.5
        return loss


class MovedAfterwardsWithHooks(MovedAfterwards):
    def __init__(self):
        super().__init__()
        for weight in self.layers.parameters():
            weight.register_hook(lambda gradient: gradient * 0.9)


class MovedBetween(Layer):
    """Between a forward and the gradient of it, of which a second one is taken."""

    def forward(self, x: Tensor) -> Tensor:
        energy = self.energy(x)
        before = [weight.data for weight in self.parameters()]
        for weight in self.parameters():
            weight.data = weight.data * 0.5
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        for weight, values in zip(self.parameters(), before, strict=True):
            weight.data = values
        return self.layers(x) + force


@pytest.mark.parametrize("kind", [MovedAfterwards, MovedAfterwardsWithHooks, lambda: Net(MovedBetween)])
def test_a_backward_has_the_weights_that_torch_keeps(kind: Callable[[], Any]) -> None:
    module = seeded(kind)
    expected = alone(module, batch_of(), num_microbatches=1)
    assert_same(piped(module, batch_of(), 2, 1, split_backward=True), expected)
    expected = piped(module, batch_of(), 1, 2)  # each micro-batch begins with the weights of the batch
    assert_same(piped(module, batch_of(), 2, 2, split_backward=True), expected)
