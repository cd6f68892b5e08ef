"""Samples of what layers gave that a step mixes before another layer, and what it counts of a batch."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.lightning_cases import Regression, assert_same, fit, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")

STAGED = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2}


MIXING = {
    "flip": lambda h: 0.6 * h + 0.4 * h.flip(0),
    "roll": lambda h: h.roll(1, 0),
    "a list": lambda h: h[list(range(len(h)))[::-1]],
    "cat": lambda h: torch.cat([h[1:], h[:1]]),
    "halves": lambda h: torch.cat(h.chunk(2)[::-1]),
    "one by one": lambda h: torch.stack([h[i] + h[i - 1] for i in range(len(h))]),
    "matrix": lambda h: torch.eye(len(h), dtype=h.dtype).flip(0) @ h,
    "mean": lambda h: h - h.mean(0),
    "first": lambda h: h - h[0],
    "attention over samples": lambda h: (h @ h.T).softmax(-1) @ h,
    "running": lambda h: h.cumsum(0),
}


def among_pairs(h):
    """Partners are in the same micro-batch."""
    return h.reshape(-1, 2, h.shape[1]).flip(1).reshape(h.shape)


def attended(h):
    heads = h.reshape(len(h), 4, 2)
    return ((heads @ heads.mT).softmax(-1) @ heads).flatten(1)


APART = {
    "residual": lambda h: h + h.tanh(),
    "features": lambda h: h.flip(1) + h.mean(1, keepdim=True),
    "columns": lambda h: torch.cat([h[:, 4:], h[:, :4]], 1),
    "norm": lambda h: nn.functional.layer_norm(h, h.shape[1:]),
    "attention": attended,
    "pairs": among_pairs,
    "one by one": lambda h: torch.stack([one * one.norm() for one in h]),
    "there and back": lambda h: h.flip(0).tanh().flip(0),
    "dropout": lambda h: nn.functional.dropout(h, 0.0),
    "transposed": lambda h: (h.T * torch.arange(8.0).double()[:, None]).T,
}


class Mixes(Regression):
    """Between its layers."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def training_step(self, batch, batch_idx):
        h = self.function(self.net[:3](batch[0]))
        return nn.functional.mse_loss(self.net[3:](h), batch[1])


def fitted(function, pipeline, make=Mixes):
    return fit(
        pipeline, lambda: make(function), max_epochs=1, limit_train_batches=2, limit_val_batches=0,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_a_step_that_mixes_what_layers_gave_before_another_is_warned_of(name):
    with pytest.warns(UserWarning, match=r"mixes what layers gave .*test_mixing_of_values.py"):
        fitted(MIXING[name], STAGED)


@pytest.mark.parametrize("name", APART)
def test_a_step_that_keeps_what_layers_gave_apart_is_not(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mixes")
        found = fitted(APART[name], STAGED)
    assert_same(found, fitted(APART[name], None))


class Counts(Mixes):
    """Before its layers, between them, or both."""

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.function(self.net, batch[0]), batch[1])


OF_THE_BATCH = {
    "len": lambda net, x: net(x / len(x)),
    "unbind": lambda net, x: net(x + len(x.unbind())),
    "list": lambda net, x: net(x * sum(1 for _ in x)),
    "a tensor": lambda net, x: net[3:](net[:3](x) * torch.tensor(1.0 * len(x.unbind())).double()),
}
OF_A_MICRO_BATCH = {
    "between": lambda net, x: net[3:](net[:3](x) / len(x.unbind())),
    "of numbers": lambda net, x: net[3:](net[:3](x) / len(x[:, 0].tolist())),
    "of an array": lambda net, x: net[3:](net[:3](x) / len(x.numpy())),
    "after a draw": lambda net, x: net[3:](nn.functional.dropout(net[:3](x), 0.0) ** len(list(x))),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_what_a_layer_is_given_by_a_count_of_samples_is_one_devices(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mixes")
        found = fitted(OF_THE_BATCH[name], STAGED, Counts)
    assert_same(found, fitted(OF_THE_BATCH[name], None, Counts))


@pytest.mark.parametrize("name", OF_A_MICRO_BATCH)
def test_a_count_of_samples_in_python_that_scales_what_a_layer_gave_is_warned_of(name):
    with pytest.warns(UserWarning, match=r"goes by a number of all of them.*test_mixing_of_values.py"):
        fitted(OF_A_MICRO_BATCH[name], STAGED, Counts)


SAMPLES, WORDS = 6, 6  # as many of these as of those
PICKED = {
    "any number": lambda mask: mask,
    "a multiple of the samples": lambda mask: (
        torch.arange(WORDS) < torch.tensor([1, 5, 2, 4, 3, 3] * 2)[:, None]  # 18 words of each batch
    ),
    "as many for each": lambda mask: torch.arange(WORDS).expand_as(mask) < 3,
}


class Words(Regression):
    """Adds places to words, and goes on with those that a mask picks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 8).double()
        self.places, self.head = nn.Embedding(WORDS, 8).double(), nn.Linear(8, 1).double()

    def training_step(self, batch, batch_idx):
        texts, mask = batch
        found = self.net(texts[..., None]) + self.places(torch.arange(WORDS))
        return (self.head(found[mask]) - texts[mask][:, None]).square().sum() / mask.sum()


def fitted_words(picks, pipeline):
    generator, module = torch.Generator().manual_seed(0), Words()
    texts = torch.randn(2 * SAMPLES, WORDS, generator=generator, dtype=torch.float64)
    data = TensorDataset(texts, picks(torch.rand(2 * SAMPLES, WORDS, generator=generator) < 0.6))
    trainer(pipeline, max_epochs=2, limit_val_batches=0).fit(module, DataLoader(data, batch_size=SAMPLES))
    return weights(module), {}


@pytest.mark.parametrize("name", PICKED)
def test_words_that_a_mask_picks_and_their_places_are_not_mixed(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mixes")
        found = fitted_words(PICKED[name], {"stages": 1, "num_microbatches": 2})
    assert_same(found, fitted_words(PICKED[name], None))
