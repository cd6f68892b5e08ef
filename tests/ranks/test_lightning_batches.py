"""How batches decide what a run does: how many there are, and into how many parts they are cut."""

import io
import itertools
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import lightning_utilities.core.rank_zero as rank_zero
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import BatchEncoding

from lightning_pipeline.errors import PipelineError
from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, fit, loader, trainer, weights
from tests.unit.runtime.test_microbatch import ReadOnly, Written
from tests.unit.split.test_later_shapes import Packed, padded_texts

Ranks = Callable[[int], Pool]


class Normalised(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8, dtype=torch.float64))


def fit_normalised(num_microbatches: int | str = "auto") -> tuple[dict[str, Tensor], str]:
    module, run = Normalised(), trainer({"stages": 2, "num_microbatches": num_microbatches}, max_epochs=1)
    lines, handler = io.StringIO(), logging.StreamHandler()
    handler.setStream(lines)
    rank_zero.log.addHandler(handler)
    try:
        run.fit(module, loader())
    finally:
        rank_zero.log.removeHandler(handler)
    return weights(module), lines.getvalue()


def test_batch_norm_trains_with_a_number_of_micro_batches_that_it_can_and_says_so(ranks: Ranks) -> None:
    (first, says), (second, _) = ranks(2)(fit_normalised)  # batches of 8 on 2 ranks are otherwise cut into 8
    assert_same((first, {}), (second, {}))
    assert says.count("Batch norms see micro-batches of 2 samples, as under gradient accumulation") == 1
    assert "PipelineStrategy(stages=1, num_microbatches=4)" in says


def test_whole_batches_need_no_word_on_batch_norms(ranks: Ranks) -> None:
    (first, says), _ = ranks(2)(fit_normalised, 1)
    assert "Batch norms" not in says
    assert_same((first, {}), (fit(None, Normalised, max_epochs=1)[0], {}))


def only_validated() -> float:
    module, run = Regression(), trainer({"stages": 2}, limit_train_batches=0)
    before = weights(module)
    run.fit(module, loader(), loader(seed=4))
    assert_same((weights(module), {}), (before, {}))
    return float(run.validate(module, loader(seed=4), verbose=False)[0]["val_loss"])


def test_a_fit_without_training_batches_still_checks_validation(ranks: Ranks) -> None:
    first, second = ranks(2)(only_validated)
    run = trainer(None)
    (expected,) = run.validate(Regression(), loader(seed=4), verbose=False)
    assert first == second == pytest.approx(expected["val_loss"], rel=1e-10)


class OwnSplit(Regression):
    """Batches that only the user can cut: `cut` says how."""

    def cut(self, batch: Any, begin: int, end: int) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        bounds = [8 * number // num_microbatches for number in range(num_microbatches + 1)]
        return [self.cut(batch, *pair) for pair in itertools.pairwise(bounds)]


class JoinedViews(OwnSplit):
    """Two views of 8 samples, joined to 16 rows, and one target for both."""

    def made(self, batch: Any) -> Any:
        return torch.cat([batch[0], batch[0].flip(1)]), batch[1]

    def cut(self, batch: Any, begin: int, end: int) -> Any:
        views, y = batch
        return torch.cat([view[begin:end] for view in views.chunk(2)]), y[begin:end]

    def loss(self, batch: Any) -> Tensor:
        one, other = self.net(batch[0]).chunk(2)
        return nn.functional.mse_loss(one, batch[1]) + nn.functional.mse_loss(one, other)


class TwoLoaders(OwnSplit):
    """As a CombinedLoader of two batch sizes gives them."""

    def made(self, batch: Any) -> Any:
        return {"labelled": batch, "unlabelled": batch[0][:4] + 1}

    def cut(self, batch: Any, begin: int, end: int) -> Any:
        half = slice(begin // 2, end // 2)
        return {
            "labelled": tuple(t[begin:end] for t in batch["labelled"]),
            "unlabelled": batch["unlabelled"][half],
        }

    def loss(self, batch: Any) -> Tensor:
        both = self.net(torch.cat([batch["labelled"][0], batch["unlabelled"]]))
        number = len(batch["labelled"][0])
        return (
            nn.functional.mse_loss(both[:number], batch["labelled"][1]) + 0.1 * both[number:].square().mean()
        )


class Graph(OwnSplit):
    """Nodes, four to a graph of 2 graphs, edges with numbers of nodes, one target for each node."""

    def made(self, batch: Any) -> Any:
        edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 4], [1, 2, 3, 0, 5, 6, 7, 4, 6]])
        return {"edge_index": edges, "x": batch[0], "y": batch[1]}

    def cut(self, batch: Any, begin: int, end: int) -> Any:
        edges = batch["edge_index"]
        inside = (edges[0] >= begin) & (edges[0] < end)
        return {
            "edge_index": edges[:, inside] - begin,
            "x": batch["x"][begin:end],
            "y": batch["y"][begin:end],
        }

    def loss(self, batch: Any) -> Tensor:
        start, end = batch["edge_index"]
        return nn.functional.mse_loss(self.net(batch["x"].index_add(0, end, batch["x"][start])), batch["y"])


class Collated(Dataset[Any]):
    def __init__(self, module: Any) -> None:
        self.batches = [module.made(tuple(batch)) for batch in loader(16)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def fit_collated(pipeline: dict[str, Any] | None, make: Any) -> Any:
    module, run = make(), trainer(pipeline)
    data = DataLoader(Collated(module), batch_size=None)
    run.fit(module, data, data)
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("make", [JoinedViews, TwoLoaders, Graph])
def test_batches_that_the_user_cuts_train_and_log_as_on_one_device(ranks: Ranks, make: Any) -> None:
    expected = fit_collated(None, make)
    for found in ranks(2)(fit_collated, {"stages": 2, "num_microbatches": 2}, make, group=False):
        assert_same(found, expected)


class UncutViews(JoinedViews):
    split_batch = None  # type: ignore[assignment]


class UncutGraphs(Graph):
    split_batch = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            UncutViews,
            r"first dimension: batch\[0\] \(16, 6\) to \(8, 6\); each part gets whole: batch\[1\] \(8, 3\)",
        ),
        (UncutGraphs, r"batch\['x'\] \(8, 6\) to \(4, 6\), .*gets whole: batch\['edge_index'\] \(2, 9\)"),
    ],
)
def test_an_error_of_a_wrongly_cut_batch_says_how_it_was_cut(ranks: Ranks, make: Any, text: str) -> None:
    for outcome in ranks(2).outcomes(fit_collated, {"stages": 2, "num_microbatches": 2}, make, group=False):
        assert outcome.error is not None
        found = "\n".join(outcome.error.__notes__)
        assert re.search(text + r".*override `split_batch\(batch, num_microbatches\)`", found), found


class Numbers(Regression):
    """Its loaders are plain lists."""

    def output(self, batch: dict[str, int]) -> Tensor:
        return self.net(torch.full((4, FEATURES), batch["a"] / 4 + batch["b"] / 8, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.output(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("out", self.output(batch).sum(), batch_size=1)


def fit_numbers(pipeline: dict[str, Any] | None) -> Any:
    module, run = Numbers(), trainer(pipeline)
    lists = {"a": [0, 1, 2], "b": [3, 4]}
    run.fit(module, CombinedLoader(lists, "max_size_cycle"), CombinedLoader(lists, "min_size"))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


def test_lists_of_numbers_are_loaders_as_on_one_device(ranks: Ranks) -> None:
    expected = fit_numbers(None)
    for found in ranks(2)(fit_numbers, {"stages": 2}):
        assert_same(found, expected)


class InMapping(Regression):
    """Its batches are mappings of the user's own class, and its first unit takes one whole."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net[0] = OfMapping(self.net[0])
        self.kind = kind

    def loss(self, batch: Any) -> Tensor:
        assert type(batch) is self.kind
        return nn.functional.mse_loss(self.net(batch), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class OfMapping(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first

    def forward(self, batch: Any) -> Tensor:
        return self.first(batch["x"])


def fit_mappings(pipeline: dict[str, Any] | None, kind: Any) -> Any:
    def collate(samples: Any) -> Any:
        x, y = default_collate(samples)
        return kind({"x": x, "y": y})

    module, run = InMapping(kind), trainer(pipeline, max_epochs=1)
    run.fit(module, loader(collate_fn=collate), loader(seed=4, collate_fn=collate))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("kind", [ReadOnly, Written, BatchEncoding])
def test_batches_that_are_mappings_of_any_class_train_as_on_one_device(ranks: Ranks, kind: Any) -> None:
    expected = fit_mappings(None, kind)
    for found in ranks(2)(fit_mappings, {"stages": 2, "num_microbatches": 2}, kind, group=False):
        assert_same(found, expected)


class Tagger(pl.LightningModule):
    """Packed texts, each batch as wide as its longest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Packed()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return Packed.training_step(self.net, batch, 0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, batch_size=len(batch["x"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("error", self.loss(batch), batch_size=len(batch["x"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def cut_to_width(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    width = int(batch["lengths"].max())
    return {name: part[:, :width] if part.dim() > 1 else part for name, part in batch.items()}


def fit_texts(pipeline: dict[str, Any] | None) -> Any:
    module, run = Tagger(), trainer(pipeline, max_epochs=1)
    texts = [cut_to_width(padded_texts(number, samples)) for number, samples in enumerate((4, 4, 3))]
    run.fit(module, DataLoader(texts, batch_size=None), DataLoader(texts[::-1], batch_size=None))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.filterwarnings("error:.*calls other functions")
def test_packed_texts_of_other_lengths_train_as_on_one_device(ranks: Ranks) -> None:
    expected = fit_texts(None)
    for found in ranks(2)(fit_texts, {"stages": 2, "num_microbatches": 2}, timeout=180):
        assert_same(found, expected)


class OfTwoLoaders(Regression):
    """Of which one gives smaller batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = batch["one"], batch["other"]
        loss = self.loss(one) + 0.1 * self.net(other[0]).square().mean()
        self.log("loss", loss, on_epoch=True, batch_size=len(one[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("out", self.net(batch["one"][0]).mean() + self.net(batch["other"][0]).mean(), batch_size=1)


class Flat(OfTwoLoaders):
    """Nothing says which tensors are of which loader."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return dict(zip("xyuv", (*batch["one"], *batch["other"]), strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step({"one": (batch["x"], batch["y"]), "other": (batch["u"],)}, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step({"one": (batch["x"], batch["y"]), "other": (batch["u"],)}, batch_idx)


def fit_two_loaders(pipeline: dict[str, Any] | None, kind: type[OfTwoLoaders], samples: int = 8) -> Any:
    module, run = kind(), trainer(pipeline)
    other = DataLoader(loader(20, seed=5).dataset, batch_size=samples)  # as many, and 4 in the last
    loaders = {"one": loader(22), "other": other}  # 8, 8 and 6
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(module, CombinedLoader(loaders, "min_size"), CombinedLoader(loaders, "min_size"))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), [str(one.message) for one in told]


@pytest.mark.parametrize("samples", [4, 16])
def test_batches_of_several_loaders_have_the_samples_of_the_largest(ranks: Ranks, samples: int) -> None:
    expected, _ = fit_two_loaders(None, OfTwoLoaders, samples)
    pipeline = {"stages": 2, "num_microbatches": 2}
    found = ranks(2)(fit_two_loaders, pipeline, OfTwoLoaders, samples, group=False)
    for one, _ in found:
        assert_same(one, expected)


def test_a_later_batch_of_several_loaders_is_cut_as_those_before_it(ranks: Ranks) -> None:
    expected, _ = fit_two_loaders(None, Flat)
    pipeline = {"stages": 2, "num_microbatches": 2}
    for one, told in ranks(2)(fit_two_loaders, pipeline, Flat, group=False):
        assert_same(one, expected)
        assert not [text for text in told if "is one micro-batch" in text]


class CountsTheOther(Regression):
    """Counts and logs by how many samples the second loader's batch has, of which the last is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = super().loss(batch["one"]), super().loss(batch["other"])
        self.seen += len(batch["other"][0])
        self.log("seen", float(self.seen))
        self.log("other", other, on_step=False, on_epoch=True, batch_size=len(batch["other"][0]))
        return one + other

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(self.seen)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 1 / (10 + self.seen)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", super().loss(batch["other"]), batch_size=len(batch["other"][0]))


def fit_counting(pipeline: dict[str, Any] | None) -> Any:
    module, run = CountsTheOther(), trainer(pipeline)

    def both(seed: int) -> CombinedLoader:
        return CombinedLoader({"one": loader(12, 4, seed), "other": loader(9, 4, seed + 5)}, "min_size")

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decides by the sum")
        run.fit(module, both(0), both(1))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), module.history


@pytest.mark.parametrize("stages", [1, 2])
def test_a_batch_of_which_one_loader_has_fewer_samples_than_before_counts_once(
    ranks: Ranks, stages: int
) -> None:
    expected, history = fit_counting(None)
    for found, seen in ranks(stages)(fit_counting, {"stages": stages, "num_microbatches": 2}):
        assert_same(found, expected)
        assert seen == history


class Doubles(DataLoader[Any]):
    """Gives other batches than it reads."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield {"x": 2 * x, "y": y}


class ByLists(DataLoader[Any]):
    """Indexes its data by lists, as torch-spatiotemporal does."""

    @property
    def _auto_collation(self) -> bool:
        return False

    @property
    def _index_sampler(self) -> Any:
        return self.batch_sampler


class ForEver(DataLoader[Any]):
    """Keeps its workers by one iterator for all epochs, as timm does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeats(self.batch_sampler))
        self.batches = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.batches)


class Repeats:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from self.sampler


class OfTheirBatches(Regression):
    by_names = False

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["x"], batch["y"]) if self.by_names else batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


def fit_loaded(pipeline: dict[str, Any] | None, kind: type[DataLoader[Any]]) -> Any:
    pl.seed_everything(3, verbose=False)
    module, run, data = OfTheirBatches(), trainer(pipeline), loader().dataset
    module.by_names = kind is Doubles
    by_default = default_collate if kind is not ByLists else list
    run.fit(module, kind(data, 8, shuffle=True, collate_fn=by_default), kind(data, 8, collate_fn=by_default))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [Doubles, ByLists, ForEver])
def test_a_loader_of_a_class_of_the_projects_is_read_as_it_says(
    ranks: Ranks, kind: type[DataLoader[Any]], stages: int
) -> None:
    expected = fit_loaded(None, kind)
    for found in ranks(stages)(fit_loaded, {"stages": stages, "num_microbatches": 2}, kind):
        assert_same(found, expected)


def with_some_again(samples: list[Any]) -> dict[str, Any]:
    """A batch, and of one that is smaller than 8 samples only four of them."""
    x, y = default_collate(samples)
    number = 8 if len(x) == 8 else 4
    return {"one": [x, y], "other": [x[:number], y[:number]]}


def fit_some_again(pipeline: dict[str, Any] | None) -> Any:
    module, run = OfTwoLoaders(), trainer(pipeline)
    data = DataLoader(loader(22).dataset, batch_size=8, collate_fn=with_some_again)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(module, data, data)
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), [str(one.message) for one in told]


def test_a_later_batch_whose_samples_are_not_told_is_one_micro_batch(ranks: Ranks) -> None:
    expected, _ = fit_some_again(None)
    found = ranks(2)(fit_some_again, {"stages": 2, "num_microbatches": 2}, group=False)
    for one, _ in found:
        assert_same(one, expected)
    told = [text for _, texts in found for text in texts if "is one micro-batch" in text]
    assert any(
        "for it cannot be cut as those before it: the parts of a batch have lengths" in t for t in told
    )


class Related(Regression):
    """A graph: a row and a column for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        near = batch_idx + torch.ones(8, 8, dtype=x.dtype)
        return nn.functional.mse_loss(self.net(near @ x), y)


def fit_related(pipeline: dict[str, Any]) -> str:
    with pytest.raises(PipelineError) as told:
        trainer(pipeline).fit(Related(), loader())
    return "\n".join([str(told.value), *getattr(told.value, "__notes__", [])])


def test_a_step_that_is_not_traced_for_its_samples_says_how_it_was_cut(ranks: Ranks) -> None:
    for text in ranks(2)(fit_related, {"stages": 2, "num_microbatches": 2}, group=False):
        assert "cannot be traced" in text
        assert "The step ran on micro-batches of 4 of the batch's 8 samples" in text
        assert "(an adjacency matrix) is cut by rows alone" in text


class FilledLate(Dataset[Any]):
    """Has no samples before the epoch starts."""

    samples: list[Any] | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]  # type: ignore[index]


class FillsLate(Regression):
    """As one that plays before it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.data = FilledLate()

    def on_train_epoch_start(self) -> None:
        self.data.samples = list(loader(8).dataset)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)


def test_a_first_batch_that_a_hook_makes_is_told_to_come_too_late() -> None:
    trainer(None).fit(FillsLate())
    with pytest.raises(TypeError) as told:
        trainer({"stages": 1, "num_microbatches": 2}).fit(FillsLate())
    assert any(
        "reads the first batch of training_step before the run begins" in one for one in told.value.__notes__
    )
