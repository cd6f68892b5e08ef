"""Small modules in float64 that the tests of the split share."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import PipelineError
from tests.unit.split.pipe import Module, alone, assert_same, piped
from tests.whole import chosen

WIDTH = 4
Cuts = Sequence[Sequence[str] | int]
CUTS: Cuts = (["layers.1"], ["layers.0", "layers.2", "layers.3"])
MORE_CUTS: Cuts = (["layers.0"], ["layers.2"], ["layers.3"], ["head"], ["layers.1", "layers.2"])


class Anew(torch.autograd.Function):
    """Runs layers without a graph, and once more in the backward, as reversible nets do."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layers: Sequence[nn.Module],
        again: Callable[[Any, Tensor], Tensor] = nn.Module.__call__,
    ) -> Tensor:
        ctx.layers, ctx.again = layers, again
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (saved,) = ctx.saved_tensors
        x = start = saved.detach().requires_grad_()
        with torch.enable_grad():
            for layer in ctx.layers:
                x = ctx.again(layer, x)
        torch.autograd.backward(x, gradient)
        return start.grad, None, None


class Block(nn.Module):
    """A tanh and a linear map; its output may be changed in place."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.m = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(torch.tanh(x))


class Net(Module):
    """`emb`, four `layers`, `head`. Tests override `body`, or the whole step."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h

    def loss(self, h: Tensor, batch: dict[str, Any]) -> Tensor:
        return F.mse_loss(self.head(h), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.body(self.emb(batch["x"])), batch)


def batch_of(size: int = 4, length: int | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Inputs `x` and targets `y`, (size, width) or (size, length, width)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size,) if length is None else (size, length)
    return {
        "x": torch.randn(*shape, WIDTH, dtype=torch.float64, generator=generator),
        "y": torch.randn(*shape, 2, dtype=torch.float64, generator=generator),
    }


def seeded(kind: Callable[[], Any], seed: int = 0) -> Any:
    """A module whose weights depend on the seed only."""
    torch.manual_seed(seed)
    return kind().double()


def _daily(cuts: Cuts) -> Cuts:
    if cuts is CUTS:
        return chosen(cuts, 1)
    return chosen(cuts, 1, 4) if cuts is MORE_CUTS else cuts


def assert_works(
    kind: Callable[[], Any],
    batch: Any = None,
    cuts: Cuts = CUTS,
    **options: Any,
) -> None:
    """Every one of these cuts (names of first units, or a number of stages) equals one process.

    Of `CUTS` and `MORE_CUTS` one and two in the daily run.
    """
    module = seeded(kind)
    batch = batch if batch is not None else batch_of()
    units = options.pop("units", None)
    expected = alone(module, batch, **options)
    for cut in _daily(cuts):
        stages, how = (cut, "uniform") if isinstance(cut, int) else (len(cut) + 1, cut)
        assert_same(piped(module, batch, stages=stages, how=how, units=units, **options), expected)


def assert_refused(
    kind: Callable[[], Any],
    match: str,
    batch: Any = None,
    cuts: Cuts = CUTS,
    **options: Any,
) -> None:
    """Every one of these cuts is refused with a message that names what is at fault."""
    module = seeded(kind)
    batch = batch if batch is not None else batch_of()
    alone(module, batch, **{k: v for k, v in options.items() if k in ("num_microbatches", "steps", "step")})
    for cut in _daily(cuts):
        stages, how = (cut, "uniform") if isinstance(cut, int) else (len(cut) + 1, cut)
        with pytest.raises(PipelineError, match=match):
            piped(module, batch, stages=stages, how=how, **options)


def same_or_refused(
    kind: Callable[[], Any],
    match: str,
    batch: Any = None,
    cuts: Cuts = CUTS,
    **options: Any,
) -> list[bool]:
    """For each cut, whether it equals one process; if not it is refused with such a message."""
    module = seeded(kind)
    batch = batch if batch is not None else batch_of()
    expected = alone(module, batch, **options)
    worked = []
    for cut in cuts:
        stages, how = (cut, "uniform") if isinstance(cut, int) else (len(cut) + 1, cut)
        try:
            outcome = piped(module, batch, stages=stages, how=how, **options)
        except PipelineError as error:
            assert pytest.RaisesExc(PipelineError, match=match).matches(error), error
            worked.append(False)
        else:
            assert_same(outcome, expected)
            worked.append(True)
    return worked
