"""Two passes through the same layers, with micro-batches of different sizes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.split.pipe import Module, alone, assert_same, piped


class TwoPasses(Module):
    """The second pass starts on the first stage, after code that reads the first pass's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        first = F.mse_loss(self.net(x), y)
        second = F.mse_loss(self.net(x.flip(0)), y)
        return first + 0.5 * second


def test_shapes_of_later_units_are_those_of_each_microbatch() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64))
    module = TwoPasses()
    for stages in (2, 4):
        assert_same(piped(module, batch, stages=stages, num_microbatches=3), alone(module, batch, 3))
