"""A small layer that is called before and after the others does not keep them on one stage; nor does a group that
is one module keep the end of the step.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import PartitionError
from lightning_pipeline.model.cut import opened
from lightning_pipeline.model.tensors import restore
from lightning_pipeline.model.trace import Trace, Unit, find_units, trace_step
from tests.unit.split.nets import Anew
from tests.unit.split.pipe import Module, alone, assert_same, piped


class Normalised(Module):
    """A forecaster whose first layer keeps mean and spread, by which it undoes itself at the end."""

    def __init__(self, buffers: bool = False, width: int = 6) -> None:
        super().__init__()
        self.norm = Reversible(width, buffers)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        h = self.norm(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return F.mse_loss(self.norm(h, back=True), target)


class Reversible(nn.Module):
    def __init__(self, width: int, buffers: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.1))
        if buffers:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, back: bool = False) -> Tensor:
        if back:
            return x / self.scale * self.spread + self.mean
        self.mean, self.spread = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 0.1
        return (x - self.mean) / self.spread * self.scale


def batch_of_rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 6)


def assert_trains(kind: type[Module], stages: int) -> None:
    torch.manual_seed(0)
    module = kind().double()
    batch = tuple(part.double() for part in batch_of_rows())
    assert_same(piped(module, batch, stages=stages), alone(module, batch))


@pytest.mark.parametrize("stages", [2, 3])
def test_a_layer_that_undoes_itself_at_the_end_runs_on_every_stage(stages: int) -> None:
    assert_trains(Normalised, stages)


def test_its_trace_leaves_nothing_to_search_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What notes the tensors that a graph keeps held the outputs of a unit: a circle, and a refusal of its trace."""
    searched = []
    monkeypatch.setattr(restore, "_empty_caches", searched.append)
    assert_trains(Normalised, 2)
    assert not searched


def test_one_with_buffers_keeps_what_is_between_on_its_stage() -> None:
    with pytest.raises(PartitionError, match="circle.*'norm' is called again"):
        piped(Normalised(buffers=True), batch_of_rows())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(Anew.apply(x, self.layers))


class Reversing(Module):
    """Layers in one function, which is in a module with a norm, between an embedding and a head."""

    def __init__(self, apart: bool = True) -> None:
        super().__init__()
        self.emb, self.encoder, self.head = nn.Linear(6, 6), Encoder(), nn.Linear(6, 6)
        self.apart = apart

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h = torch.tanh(self.emb(batch[0]))
        h = self.encoder(h) if self.apart else self.encoder.norm(Anew.apply(h, self.encoder.layers))
        return F.mse_loss(self.head(h), batch[1])


@pytest.mark.parametrize("stages", [2, 3])
def test_layers_in_a_function_of_autograd_are_one_unit_where_units_are_too_few(stages: int) -> None:
    assert_trains(Reversing, stages)


def test_where_the_step_calls_the_function_its_layers_stay_at_the_end() -> None:
    with pytest.raises(PartitionError, match="autograd function Anew calls units in its forward"):
        piped(Reversing(apart=False), batch_of_rows(), stages=3)


class Cycles(Module):
    """Forty layers that are gone through twice, each of them small beside all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(40))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h = batch[0]
        for _ in range(2):
            for layer in self.layers:
                h = torch.tanh(layer(h))
        return F.mse_loss(h, batch[1])


def test_many_small_layers_that_are_gone_through_twice_cost_no_other_trace() -> None:
    traced: list[int] = []

    def trace(units: list[Unit]) -> Trace:
        traced.append(len(units))
        return trace_step(module, "training_step", (batch_of_rows(), 0), units=units)

    module = Cycles()
    opened(find_units(module), 2, trace)
    assert traced == [40]
