"""What a step counts of what layers gave, which other ranks have, too; and lengths by which layers give more."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline.errors import ConfigurationError, PlaceholderError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]
Made = Callable[[Tensor, Tensor], Any]


def counts(out: Tensor, classes: Tensor) -> Any:
    return torch.bincount(out.argmax(1), minlength=3)


def weighed(out: Tensor, classes: Tensor) -> Any:
    return torch.bincount(classes, weights=out[:, 0], minlength=3)


def different(out: Tensor, classes: Tensor) -> Any:
    rows, numbers = (out > 0).long().unique(dim=0, return_counts=True)
    return len(rows), numbers.max()


def runs(out: Tensor, classes: Tensor) -> Any:
    return out.argmax(1).unique_consecutive(return_counts=True)[1].sum()


def alike(out: Tensor, classes: Tensor) -> Any:
    return torch.allclose(out, 1e-9 * out), torch.equal(out.argmax(1), classes)


def sparse(out: Tensor, classes: Tensor) -> Any:
    return (out > 0).to_sparse().values().sum()


MADE = [counts, weighed, different, runs, alike, sparse]


class Counts(Regression):
    """A confusion matrix in a plain tensor, which is no buffer."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made, self.matrix = made, torch.zeros(3, 3, dtype=torch.long)

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        out = self.net(batch[0])
        return {
            "loss": mse_loss(out, batch[1]),
            "made": self.made(out.detach(), batch[1].argmax(1)),
            "n": len(out),
        }

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pairs = 3 * self.net(batch[0]).argmax(1) + batch[1].argmax(1)
        self.matrix += torch.bincount(pairs, minlength=9).view(3, 3)

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.matrix.trace() / self.matrix.sum())
        self.matrix.zero_()


class Keeps(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        made = outputs["made"] if isinstance(outputs["made"], tuple) else [outputs["made"]]
        self.seen += [outputs["n"], *(torch.as_tensor(one).tolist() for one in made)]

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(float(trainer.callback_metrics.get("accuracy", -1)))


def counted(pipeline: dict[str, Any] | None) -> list[list[Any]]:
    found = []
    for made in MADE:
        keeps = Keeps()
        trainer(pipeline, max_epochs=1, callbacks=[keeps]).fit(Counts(made), loader(), loader(seed=4))
        found.append(keeps.seen)
    return found


def test_every_rank_has_what_a_step_counts(ranks: Ranks) -> None:
    expected = counted(None)
    for found in ranks(2)(counted, {"stages": 2, "num_microbatches": 2}):
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert mine == pytest.approx(theirs)


class Trims(nn.Module):
    """Cuts texts to the longest that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.net = nn.GRU(6, 8, batch_first=True)

    def forward(self, texts: Tensor, lengths: Tensor) -> Tensor:
        return self.net(self.words(texts[:, : int(lengths.max())]))[0]


class Packs(Trims):
    """The same, by packed sequences."""

    def forward(self, texts: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(texts), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.net(packed)[0], batch_first=True)[0]


class Tagger(Regression):
    """Counts the words of what its first layer gives, which are as many as values say."""

    def __init__(self, kind: type[Trims]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.head = kind().double(), nn.Linear(8, 4, dtype=torch.float64)

    def loss(self, batch: Any) -> Tensor:
        texts, lengths, tags = batch
        found = self.net(texts, lengths)
        mask = torch.arange(found.shape[1]) < lengths[:, None]
        return cross_entropy(self.head(found)[mask], tags[:, : found.shape[1]][mask])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tags", self.loss(batch))


LENGTHS = [1, 2, 3, 1, 3, 3, 2, 4, 5, 3, 2, 4, 1, 2, 2, 1, 1, 6, 2, 6, 5, 3]


def tagged(pipeline: dict[str, Any] | None, kind: type[Trims], model: type[Tagger] = Tagger) -> Any:
    generator, number = torch.Generator().manual_seed(0), len(LENGTHS)
    texts, tags = (torch.randint(0, most, (number, 6), generator=generator) for most in (20, 4))
    data, module = TensorDataset(texts, torch.tensor(LENGTHS), tags), model(kind)
    fitted = trainer(pipeline, max_epochs=2)
    fitted.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    return weights(module), {name: float(value) for name, value in fitted.callback_metrics.items()}


@pytest.mark.filterwarnings("error:.*taken for a mean over samples")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [Trims, Packs])
def test_an_encoder_gives_as_many_words_as_lengths_say(ranks: Ranks, kind: type[Trims], stages: int) -> None:
    expected = tagged(None, kind)
    pipeline = {"stages": stages, "num_microbatches": 2}
    for found in ranks(stages)(tagged, pipeline, kind, group=False):
        assert_same(found, expected)


class AllWords(Tagger):
    """Counts padding, too."""

    def loss(self, batch: Any) -> Tensor:
        texts, lengths, tags = batch
        found = self.net(texts, lengths)
        return cross_entropy(self.head(found).mT, tags[:, : found.shape[1]])


class EachTexts(Tagger):
    def loss(self, batch: Any) -> Tensor:
        texts, lengths, tags = batch
        return cross_entropy(self.head(self.pooled(self.net(texts, lengths), lengths)), tags[:, 0])


class Pooled(EachTexts):
    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        return found.mean(1)


class Attended(EachTexts):
    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        return (found.mean(2).softmax(1)[..., None] * found).sum(1)


class Masked(EachTexts):
    """Leaves padding out."""

    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(found.shape[1]) < lengths[:, None]
        return (mask[..., None] * found).sum(1) / lengths[:, None]


class MaskedAfterDropout(Masked):
    """Draws otherwise for a micro-batch than for the batch as one."""

    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        return super().pooled(dropout(found, 0.3, self.training), lengths)


class MaskedAfterNoise(Masked):
    """Likewise, in evaluation too."""

    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        return super().pooled(found + 0.1 * torch.randn_like(found), lengths)


class PooledAfterDropout(Pooled):
    def pooled(self, found: Tensor, lengths: Tensor) -> Tensor:
        return super().pooled(dropout(found, 0.3, self.training), lengths)


def said_of_padding(pipeline: dict[str, Any] | None, kind: type[Tagger]) -> tuple[list[str], Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = tagged(pipeline, Packs, kind)
    return [str(one.message) for one in caught if "padding" in str(one.message)], found


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (AllWords, "takes a mean of 32 values for a batch as one"),
        (Pooled, "net gives as much for each sample as the longest"),
        (Attended, "net gives as much for each sample as the longest"),
        (PooledAfterDropout, "net gives as much for each sample as the longest"),
        (MaskedAfterDropout, ""),
        (MaskedAfterNoise, ""),
        (Masked, ""),
    ],
)
def test_padding_of_the_batch_that_counts_is_told(
    ranks: Ranks, kind: type[Tagger], said: str, stages: int
) -> None:
    pipeline = {"stages": stages, "num_microbatches": 2}
    every = ranks(stages)(said_of_padding, pipeline, kind, group=False)
    told = [line for lines, _ in every for line in lines]
    assert sum("training_step" in line and said in line for line in told) == bool(said), told
    assert bool(told) == bool(said)
    if kind is Masked:
        for _, found in every:
            assert_same(found, tagged(None, Packs, kind))


class Returns(Tagger):
    """What it returns beside its loss is as wide as the longest text of each micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "words": self.net(*batch[:2])}


class ReadsReturned(Returns):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs["words"].shape


class Predicts(Tagger):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(*batch[:2])


WIDTHS = r"sizes beside the samples differ \(\(4, \d, 8\), .*pad it"


@pytest.mark.parametrize("stages", [1, 2])
def test_widths_that_differ_matter_where_they_are_read_alone(ranks: Ranks, stages: int) -> None:
    pipeline, expected = {"stages": stages, "num_microbatches": 2}, tagged(None, Trims, Returns)
    for found in ranks(stages)(tagged, pipeline, Trims, Returns, group=False):
        assert_same(found, expected)


def test_a_width_that_is_read_or_predicted_is_refused_in_words() -> None:
    pipeline = {"stages": 1, "num_microbatches": 2}
    with pytest.raises(PlaceholderError, match="entry 'words' of what it returned .* cannot be merged"):
        tagged(pipeline, Trims, ReadsReturned)
    module, lengths = Predicts(Trims), torch.tensor(LENGTHS[:8])
    data = DataLoader(TensorDataset(torch.ones(8, 6, dtype=torch.long), lengths), batch_size=8)
    with pytest.raises(ConfigurationError, match=WIDTHS):
        trainer(pipeline).predict(module, data)
