"""A fit in which epochs, tasks and drawn numbers choose which layers are called."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, fit

Ranks = Callable[[int], Pool]


class Deepening(Regression):
    """Two layers in the first epoch, four from then on; every second batch has a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8)).double()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).double()
        self.heads = nn.ModuleList(nn.Linear(8, TARGETS) for _ in range(2)).double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h = self.net(batch[0])
        for layer in self.layers if self.current_epoch else self.layers[:2]:
            h = h + layer(h).tanh()
        loss = F.mse_loss(self.heads[batch_idx % 2](h), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        h = self.net(batch[0])
        for layer in self.layers:
            h = h + layer(h).tanh()
        self.log("val_loss", F.mse_loss(self.heads[0](h), batch[1]))


def test_depth_by_epoch_and_heads_by_batch_train_as_on_one_device(ranks: Ranks) -> None:
    expected = fit(None, Deepening)
    for found in ranks(3)(fit, {"stages": 3, "num_microbatches": 2}, Deepening):
        assert_same(found, expected)
