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


class Confident(nn.Module):
    """Two layers, or the first one alone, by what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        h = self.layers[0](h).tanh()
        return h if h[0, 0] > 0 else self.layers[1](h)


class Confidently(Regression):
    """A part that chooses by what a unit computes, and layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8)).double()
        self.choosing = Confident().double()
        self.head = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, TARGETS)]).double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h = self.choosing(self.net(batch[0]))
        return F.mse_loss(self.head[1](self.head[0](h).tanh()), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def test_a_choice_by_values_over_a_cut_names_the_units_with_which_it_works(ranks: Ranks) -> None:
    options = {"stages": 2, "num_microbatches": 4, "partition": ["head.0"]}
    for outcome in ranks(2).outcomes(fit, options, Confidently):
        assert "PipelineStrategy(units=['choosing'])" in str(outcome.error), outcome.error
    expected = fit(None, Confidently)
    options = {"stages": 2, "num_microbatches": 1, "units": ["choosing"]}
    for found in ranks(2)(fit, options, Confidently):
        assert_same(found, expected)
