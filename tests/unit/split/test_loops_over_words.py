"""A step that calls layers once for each word goes another way for each length."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.ranks.lightning_cases import Regression, assert_same, trainer, weights
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")


class Decodes(Regression):
    """A cell for each word, as decoders without a kernel for all of them have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.cell = nn.Linear(6, 6).double(), nn.GRUCell(6, 6).double()
        self.last = nn.Linear(6, 3).double()

    def loss(self, batch):
        x, y = batch
        hidden, found = torch.tanh(self.first(x[:, 0])), []
        for word in range(x.shape[1]):
            hidden = self.cell(x[:, word], hidden)
            found.append(self.last(hidden))
        return (torch.stack(found, 1) - y).pow(2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def texts(seed):
    generator = torch.Generator().manual_seed(seed)

    def made(words, numbers):
        return torch.randn(7, words, numbers, generator=generator, dtype=torch.float64)

    return DataLoader([(made(words, 6), made(words, 3)) for words in (4, 5, 3, 6, 4, 2)], batch_size=None)


def fitted(pipeline):
    module, run = Decodes(), trainer(pipeline, max_epochs=2)
    run.fit(module, texts(0), texts(1))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("way", WAYS)
def test_each_length_goes_its_own_way(way):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*micro-batch")
        found = fitted(WAYS[way])
    assert_same(found, fitted(None))


def test_ranks_go_the_same_way(ranks):
    expected = fitted(None)
    for found in ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, group=False):
        assert_same(found, expected)
