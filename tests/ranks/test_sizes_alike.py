"""Sizes that are alike by chance: of a batch and of its classes, of a batch and of a layer."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, trainer, weights
from tests.unit.split.test_logged_as_one import WAYS


class ClassWeights(Regression):
    """Of the collate function; the last batch has as many samples as there are classes."""

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch["x"]), batch["y"], weight=batch["weights"])
        self.log("loss", loss)
        return loss


class ColumnWeights(Regression):
    def training_step(self, batch, batch_idx):
        classes = one_hot(batch["y"], TARGETS).double()
        loss = (mse_loss(self.net(batch["x"]), classes, reduction="none") * batch["weights"]).mean()
        self.log("loss", loss)
        return loss


def collated(samples):
    inputs, classes = (torch.stack(one) for one in zip(*samples, strict=True))
    weights = torch.arange(1.0, TARGETS + 1, dtype=torch.float64)
    return {"x": inputs, "y": classes, "weights": weights}


def weighted(pipeline, kind):
    generator, number = torch.Generator().manual_seed(0), 16 + TARGETS
    inputs = torch.randn(number, FEATURES, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, torch.randint(0, TARGETS, (number,), generator=generator))
    module, run = kind(), trainer(pipeline, max_epochs=2, limit_val_batches=0)
    run.fit(module, DataLoader(data, batch_size=8, collate_fn=collated))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.filterwarnings("ignore:The batch was cut into micro-batches by the first dimension")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ClassWeights, ColumnWeights])
def test_what_all_samples_share_is_whole_in_a_batch_of_that_many(kind, way):
    assert_same(weighted(WAYS[way], kind), weighted(None, kind))


WIDTH = 8


class Packed(Regression):
    """A recurrent layer as wide as the batch has samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        kind = {"dtype": torch.float64}
        self.words, self.net = nn.Embedding(20, 6, **kind), nn.LSTM(6, WIDTH, batch_first=True, **kind)
        self.middle, self.head = nn.Linear(WIDTH, 11, **kind), nn.Linear(11, 20, **kind)

    def training_step(self, batch, batch_idx):
        texts, lengths = batch
        packed = pack_padded_sequence(
            self.words(texts), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.net(packed)
        return cross_entropy(self.head(torch.tanh(self.middle(hidden[-1]))), texts[:, 0])


def packed(pipeline):
    generator, number = torch.Generator().manual_seed(0), 22
    texts = torch.randint(1, 20, (number, 9), generator=generator)
    data = TensorDataset(texts, torch.randint(2, 10, (number,), generator=generator))
    module = Packed()
    trainer(pipeline, max_epochs=2, limit_val_batches=0).fit(module, DataLoader(data, batch_size=WIDTH))
    return weights(module), {}


def test_a_packed_layer_as_wide_as_the_batch_is_that_of_one_device(ranks):
    expected = packed(None)
    for found in ranks(2)(packed, {"stages": 2, "num_microbatches": 2}, group=False):
        assert_same(found, expected)
