"""Units that hold most of the cost and cannot be shared out are named, with what would free them."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.model.cut import too_large
from lightning_pipeline.model.cut.partitioning import partition
from lightning_pipeline.model.trace import find_units, trace_step
from tests.unit.split.nets import batch_of, seeded
from tests.unit.split.pipe import Module


class Wide(nn.Module):
    """Two matrices in one module, or two modules."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        self.into: nn.Linear | nn.Parameter = nn.Linear(4, 512) if parts else nn.Parameter(torch.ones(512, 4))
        self.out: nn.Linear | nn.Parameter = nn.Linear(512, 4) if parts else nn.Parameter(torch.ones(4, 512))

    def forward(self, x):
        if isinstance(self.into, nn.Parameter):
            return F.linear(F.linear(x, self.into), self.out)
        return self.out(self.into(x))


class Uneven(Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.emb = nn.Linear(4, 4)
        self.wide = Wide(kind != "one") if kind in ("one", "parts") else nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def _all(self, h):
        for layer in self.layers:
            h = layer(h).tanh()
        return h

    def training_step(self, batch, batch_idx):
        h = self.wide(self.emb(batch["x"]))
        match self.kind:
            case "segment":
                h = checkpoint(self._all, h, use_reentrant=False)
            case "function":
                h = Reversible.apply(self, h)
            case "circle":
                h = self._all(self._all(h))
            case _:
                h = self._all(h)
        return F.mse_loss(self.head(h), batch["y"])


class Reversible(torch.autograd.Function):
    """As reversible nets are written: layers are called where no graph is kept, and again in the backward."""

    @staticmethod
    def forward(ctx, net, h):
        return net._all(net._all(net._all(h)))

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "function",
            r"units layers.0 .. head \(5\) hold .*: autograd function Reversible calls .*checkpoint each of them",
        ),
        ("one", r"unit wide holds \d\d% .* at most 1\.\d times as fast as one: it has no parts"),
        ("parts", r"unit wide holds .*: it is kept whole; units=\['wide\.\*'\] splits it"),
        ("segment", r"units layers.0 .. layers.3 \(4\) hold \d\d% .*segment of activation.*checkpoint each"),
        (
            "circle",
            r"units layers.0 .. layers.3 \(4\) hold .*circle between them: 'layers.0', .* are called again",
        ),
    ],
)
def test_what_holds_most_of_the_cost_is_named_with_what_frees_it(kind, text):
    assert re.search(text, too_large(_cut(kind)) or "")


def test_nothing_is_said_where_no_unit_holds_half():
    assert too_large(_cut("even")) is None


def _cut(kind):
    module = seeded(lambda: Uneven(kind))
    trace = trace_step(module, "training_step", (batch_of(), 0), units=find_units(module, at_least=2))
    return partition(trace, 2)
