"""A small layer that is called before and after the others does not keep them on one stage."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import PartitionError
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


@pytest.mark.parametrize("stages", [2, 3])
def test_a_layer_that_undoes_itself_at_the_end_runs_on_every_stage(stages: int) -> None:
    torch.manual_seed(0)
    module = Normalised().double()
    batch = tuple(part.double() for part in batch_of_rows())
    assert_same(piped(module, batch, stages=stages), alone(module, batch))


def test_one_with_buffers_keeps_what_is_between_on_its_stage() -> None:
    with pytest.raises(PartitionError, match="circle.*'norm' is called again"):
        piped(Normalised(buffers=True), batch_of_rows())
