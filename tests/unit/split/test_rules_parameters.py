"""R2: parameters used outside their unit's forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.unit.split.nets import WIDTH, Net, assert_works


class TiedHead(Net):
    def loss(self, h, batch):
        return F.mse_loss(F.linear(h, self.emb.weight)[:, :2], batch["y"])


class TiedModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.emb.weight

    def loss(self, h, batch):
        return F.mse_loss(self.out(h)[:, :2], batch["y"]) + self.head(h).pow(2).mean()


class ChildOfUnit(Net):
    def body(self, h):
        h = super().body(h)
        return h + self.layers[1].m(h) + self.layers[3].m(h)


class Orthogonality(Net):
    def loss(self, h, batch):
        penalty = sum((layer.m.weight @ layer.m.weight.T).pow(2).mean() for layer in self.layers)
        return super().loss(h, batch) + 0.1 * penalty


class EarlyUse(Net):
    """A late unit's weight is read before the model."""

    def body(self, h):
        return super().body(h @ self.layers[3].m.weight)


class GlueParameters(Net):
    """A bias handed to all layers, a temperature at the end, a token at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.temperature = nn.Parameter(torch.ones(()))
        self.token = nn.Parameter(torch.randn(1, WIDTH))
        self.double()

    def body(self, h):
        h = h + self.token
        for layer in self.layers:
            h = layer(h + self.bias)
        return h

    def loss(self, h, batch):
        return super().loss(h / self.temperature, batch)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.m(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


class OtherMethod(Net):
    def __init__(self) -> None:
        super().__init__()
        self.vae = Encoder()

    def body(self, h):
        return self.vae.encode(super().body(self.vae.encode(h)))


class ForwardDirectly(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer.forward(h)
        return h


class Functional(Net):
    def body(self, h):
        for layer in self.layers:
            h = torch.func.functional_call(layer, {"m.bias": torch.ones(WIDTH, dtype=h.dtype)}, (h,))
        return h


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            parametrizations.weight_norm(layer.m)
        parametrizations.orthogonal(self.layers[0].m)


class Adapter(nn.Module):
    """A low-rank adapter, as PEFT dresses a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class LowRank(Net):
    def __init__(self) -> None:
        super().__init__(Adapter)


@pytest.mark.parametrize(
    "kind",
    [
        TiedHead, TiedModule, ChildOfUnit, Orthogonality, EarlyUse, GlueParameters, OtherMethod,
        ForwardDirectly,
        Functional, Parametrized, LowRank,
    ],
)  # fmt: skip
def test_parameters_used_anywhere_have_the_gradient_of_one_process(kind):
    assert_works(kind, num_microbatches=3, steps=2)
