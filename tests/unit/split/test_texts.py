"""Texts: rows word by word, each for all samples; losses that align them; words packed between layers."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.ranks.lightning_cases import Regression, assert_same, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")

WORDS = 5


class TimeMajor(Regression):
    """Counts hits in validation by rows of words and samples."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6).double()
        self.layer, self.out = nn.GRU(6, 6).double(), nn.Linear(6, WORDS).double()
        self.hits, self.found = 0, []

    def forward(self, texts):
        return self.layer(self.embed(texts.t()))[0]

    def training_step(self, texts, batch_idx):
        return cross_entropy(self.out(self(texts)).permute(1, 2, 0), texts)

    def validation_step(self, texts, batch_idx):
        made, wanted = self.out(self(texts).reshape(-1, 6)).argmax(1), texts.t().reshape(-1)
        self.hits += int((made == wanted).sum())
        self.found.append((made, wanted))

    def on_validation_epoch_end(self):
        self.share = float(torch.cat([(made == wanted).double() for made, wanted in self.found]).mean())
        self.found.clear()


def counted(pipeline, length):
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(WORDS, (4, length), generator=generator) for _ in range(5)]
    module = TimeMajor()
    data = DataLoader(texts, batch_size=None)
    trainer(pipeline, num_sanity_val_steps=0).fit(module, data, data)
    return module.hits, module.share


@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("length", [7, 2, 4])
def test_hits_are_one_devices_where_there_are_as_many_words_as_samples(length, num_microbatches):
    expected = counted(None, length)
    assert counted({"stages": 1, "num_microbatches": num_microbatches}, length) == pytest.approx(expected)


class Reader(nn.Module):
    """Reads frames as far as the longest of what it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 6, batch_first=True).double()

    def forward(self, frames, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(frames, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Speech(Regression):
    """A mean over texts, each divided by its own length."""

    def __init__(self):
        super().__init__()
        self.read, self.out = Reader(), nn.Linear(6, WORDS).double()

    def training_step(self, batch, batch_idx):
        frames, lengths, texts, words = batch
        made = self.out(self.read(frames, lengths)).log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(made, texts, lengths, words)


def fitted(pipeline, module, batches):
    """The weights, and what was said of micro-batches."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(pipeline, limit_val_batches=0).fit(module, DataLoader(batches, batch_size=None))
    return weights(module), [str(one.message) for one in told if "micro-batch" in str(one.message)]


def spoken(pipeline):
    generator = torch.Generator().manual_seed(1)
    lengths, words = torch.tensor([9, 8, 5, 4]), torch.tensor([2, 1, 2, 2])
    batches = [
        (
            torch.randn(4, 9, 4, generator=generator, dtype=torch.float64),
            lengths.roll(number),
            torch.randint(1, WORDS, (4, 2), generator=generator),
            words,
        )
        for number in range(3)
    ]
    return fitted(pipeline, Speech(), batches)


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_a_loss_that_aligns_texts_is_a_mean_of_texts(num_microbatches):
    expected, _ = spoken(None)
    found, told = spoken({"stages": 1, "num_microbatches": num_microbatches})
    assert_same((found, {}), (expected, {}))
    assert not told


class Packs(Regression):
    """Classifies texts by what a layer has after the last word of each."""

    def __init__(self):
        super().__init__()
        self.embed, self.read = nn.Embedding(9, 6).double(), nn.LSTM(6, 5, batch_first=True).double()
        self.out = nn.Linear(5, 3).double()

    def training_step(self, batch, batch_idx):
        texts, lengths, wanted = batch
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(texts), lengths, batch_first=True)
        return cross_entropy(self.out(self.read(packed)[1][0][-1]), wanted)


def packed(pipeline):
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randint(9, (4, 7), generator=generator),
            torch.tensor([7, 6, 5, 3]),
            torch.randint(3, (4,), generator=generator),
        )
        for _ in range(3)
    ]
    return fitted(pipeline, Packs(), batches)


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_words_that_are_packed_between_layers_have_no_padding(num_microbatches):
    expected, _ = packed(None)
    found, told = packed({"stages": 1, "num_microbatches": num_microbatches})
    assert_same((found, {}), (expected, {}))
    assert not told
