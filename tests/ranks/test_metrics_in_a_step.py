"""A torchmetrics object is given in a step what one device gives it: once a batch, with the batch's numbers."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MinMetric,
    R2Score,
    SumMetric,
)
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from lightning_pipeline.model.rehearsal.routes import RouteFinder
from tests.pool import Pool
from tests.ranks.lightning_cases import TARGETS, Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]


class MeanOfRoots(Metric):
    """What users write: a mean of what each batch gives."""

    total: Tensor
    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")
        self.add_state("batches", torch.zeros(()), "sum")

    def update(self, guess: Tensor, truth: Tensor) -> None:
        self.total = self.total + F.mse_loss(guess, truth).sqrt()
        self.batches = self.batches + 1

    def compute(self) -> Tensor:
        return self.total / self.batches


class Measures(Regression):
    """Metrics of all kinds, in training and validation; the loss is a mean by weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
        self.seen = nn.ModuleDict({step: self.metrics() for step in ("fit", "val")})
        self.kept = CatMetric()
        for part in self.modules():
            if isinstance(part, Metric):
                part.set_dtype(torch.float64)
        self.left: list[float] = []

    def metrics(self) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "weighted": MeanMetric(), "plain": MeanMetric(), "root": MeanMetric(), "masked": MeanMetric(),
                "classes": MeanMetric(), "of_f1": MeanMetric(), "rows": MeanMetric(), "spread": MeanMetric(),
                "sum": SumMetric(), "hits": SumMetric(), "size": SumMetric(), "max": MaxMetric(),
                "min": MinMetric(), "running": RunningMean(2), "own": MeanOfRoots(), "each": SumMetric(),
                "f1": MulticlassF1Score(TARGETS, average="macro"),
                "alone": MulticlassF1Score(TARGETS, average="macro"),
                "matrix": MulticlassConfusionMatrix(TARGETS, normalize="true"),
                "many": MetricCollection({"auroc": MulticlassAUROC(TARGETS), "acc": MulticlassAccuracy(TARGETS)}),
            }
        )  # fmt: skip

    def step(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        out, truth, m = self.net(x), y.argmax(1), self.seen[name]
        loss = F.cross_entropy(out, truth, weight=self.rates)
        mask = y[:, 0] > 0
        m["weighted"].update(loss, weight=self.rates[truth].sum())
        m["plain"].update(loss.item(), len(x))
        m["root"](F.mse_loss(out, y).sqrt())
        m["masked"].update(((out - y) ** 2)[mask].sum() / mask.sum(), weight=mask.sum())
        m["classes"].update(((out - y) ** 2).mean(0).sqrt())
        m["rows"].update(((out - y) ** 2).mean(1))
        m["spread"].update(y.abs().amax())
        m["sum"].update(loss)
        m["hits"].update((out.argmax(1) == truth).sum())
        m["size"].update(len(x))
        m["max"].update(loss)
        m["min"].update(loss)
        m["running"].update(loss)
        m["own"](out, y)
        score = out.softmax(1)
        f1 = m["f1"](score, truth)
        m["of_f1"].update(f1)
        self.log(f"{name}_f1", f1, on_step=True, on_epoch=True)
        self.log(f"{name}_miss", 1 - f1, on_step=True, on_epoch=True, batch_size=len(x))
        self.log_dict(
            {f"{name}_{key}": value for key, value in m["many"](score, truth).items()}, on_step=True
        )
        m["alone"].update(score, truth)
        self.log(f"{name}_alone", m["alone"].compute(), on_step=True)
        m["alone"].reset()
        for key in ("root", "own"):
            self.log(f"{name}_{key}", m[key], on_step=True, on_epoch=True)
        m["matrix"].update(score, truth)
        for one in out.abs():
            m["each"].update(one.max())
        for key, metric in m.items():
            if key not in ("root", "own", "many", "alone", "matrix"):
                self.log(f"{name}_{key}_epoch", metric, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch, "fit")
        self.kept.update(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")

    def on_train_epoch_end(self) -> None:
        matrix: Any = self.seen["fit"]["matrix"]  # type: ignore[index]
        self.left += [*self.kept.compute().tolist(), *matrix.compute().flatten().tolist()]
        self.kept.reset()


def fitted(pipeline: dict[str, Any] | None, folder: str) -> Any:
    module, run = Measures(), trainer(pipeline, inference_mode=True, writes=folder)
    run.fit(module, loader(), loader(14, seed=4))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), module.left


@pytest.mark.parametrize("number", [3, 7])
def test_metrics_are_given_the_numbers_of_the_batch(ranks: Ranks, tmp_path: Path, number: int) -> None:
    expected, left = fitted(None, str(tmp_path / "one"))
    pipeline = {"stages": 2, "num_microbatches": number}
    for found, kept in ranks(2)(fitted, pipeline, str(tmp_path / "two")):
        assert_same(found, expected, 1e-6)  # some count in single precision
        assert kept == pytest.approx(left, rel=1e-6)


def looks(batches: int) -> int:
    """How often a fit has run a step to see where it leads."""
    with mock.patch.object(RouteFinder, "_look", autospec=True, side_effect=RouteFinder._look) as look:
        fit({"stages": 2, "num_microbatches": 2}, limit_val_batches=batches)
    return look.call_count


def test_what_a_metric_counts_is_no_reason_to_look_again(ranks: Ranks) -> None:
    assert ranks(2)(looks, 2) == ranks(2)(looks, 1)  # the third batch has fewer samples


class AsksItsMetric(Regression):
    """What a step does depends on whether a metric was updated, on the stage that updates it."""

    def __init__(self) -> None:
        super().__init__()
        self.later = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.error.update_called:
            self.later += 1
        super().validation_step(batch, batch_idx)


def counted(pipeline: dict[str, Any] | None) -> int:
    module = AsksItsMetric()
    trainer(pipeline, num_sanity_val_steps=0).fit(module, loader(), loader(seed=4))
    return module.later


def test_a_step_may_decide_by_what_a_metric_counts(ranks: Ranks) -> None:
    expected = counted(None)
    assert expected == 4  # all batches of two epochs but the first ones
    assert ranks(2)(counted, {"stages": 2, "num_microbatches": 1})[0] == expected


class Explains(Regression):
    """Calls a metric that has no value for the one sample of the last micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.explained = R2Score().set_dtype(torch.float64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.explained(self.net(batch[0])[:, 0], batch[1][:, 0])
        self.log("of all", self.explained)
        self.log("of each", found)


def explained(pipeline: dict[str, Any] | None) -> Any:
    module, run = Explains(), trainer(pipeline, max_epochs=1)
    run.fit(module, loader(), loader(11, seed=4))  # batches of 8 and 3
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_metric_that_has_no_value_for_one_sample_has_the_batchs(ranks: Ranks, stages: int) -> None:
    expected = explained(None)
    for found in ranks(stages)(explained, {"stages": stages, "num_microbatches": 2}, group=False):
        assert_same(found, expected)


class Covers(Metric):
    """Counts in attributes that are no states, as some projects' metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.covered, self._seen, self.sizes = 0, 0, list[int]()

    def update(self, guess: Tensor, truth: Tensor) -> None:
        self.covered += int((guess.argmax(1) == truth.argmax(1)).sum())
        self._seen += len(truth)
        self.sizes.append(len(truth))

    def compute(self) -> Tensor:
        return torch.tensor([self.covered / self._seen, float(sum(self.sizes)), float(len(self.sizes))])


class Guarded(Regression):
    """Calls metrics where a micro-batch has samples enough, beside a buffer to which it adds what has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.covers, self.found = Covers(), list[float]()
        self.register_buffer("precision", torch.zeros(TARGETS, TARGETS, dtype=torch.float64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.precision += out.T @ out
        if len(out) > 2:
            self.error(out, batch[1])
        if len(out) > 1:  # one of the last batch's two micro-batches
            self.covers(out, batch[1])
        return F.mse_loss(out, batch[1])

    def on_train_epoch_end(self) -> None:
        self.found.append(float(self.error.compute()))
        self.log("error", self.error.compute())
        for name, value in zip(("covered", "samples", "calls"), self.covers.compute(), strict=True):
            self.log(name, value)
        self.error.reset()
        self.precision.detach_()


def guarded(pipeline: dict[str, Any] | None) -> Any:
    module, run = Guarded(), trainer(pipeline, limit_val_batches=0)
    run.fit(module, loader(19))  # batches of 8, 8 and 3
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), logs | {f"epoch {n}": value for n, value in enumerate(module.found)}


@pytest.mark.parametrize("stages", [1, 2])
def test_metrics_that_a_few_samples_do_not_call_have_all_of_them_in_hooks(ranks: Ranks, stages: int) -> None:
    expected = guarded(None)
    for found in ranks(stages)(guarded, {"stages": stages, "num_microbatches": 2}, group=False):
        assert_same(found, expected)


class MeanWhereItCounts(Metric):
    """A loss written as a metric, as chemprop and tsl have them."""

    total: Tensor
    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")
        self.add_state("number", torch.zeros(()), "sum")

    def update(self, guess: Tensor, truth: Tensor) -> None:
        counts = truth > 0.3
        self.total += (guess - truth)[counts].square().sum()
        self.number += counts.sum()

    def compute(self) -> Tensor:
        return self.total / self.number


class OfAMetric(Regression):
    """Its loss is what a metric gives; in some micro-batches of `skewed` no target counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = MeanWhereItCounts().set_dtype(torch.float64)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.counts(self.net(batch[0]), batch[1])
        self.log("counts", self.counts, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.counts(self.net(batch[0]), batch[1]))


class OfMeans(OfAMetric):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.error(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return 2 * loss


def of_metrics(pipeline: dict[str, Any] | None, make: Callable[[], OfAMetric]) -> Any:
    module, run, data = make(), trainer(pipeline), loader()
    data.dataset.tensors[1][8:12] -= 10  # type: ignore[attr-defined]
    run.fit(module, data, loader(seed=4))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("make", [OfMeans, OfAMetric])
def test_a_loss_that_a_metric_gives_is_the_batchs(ranks: Ranks, make: Any) -> None:
    expected = of_metrics(None, make)
    for stages in (1, 2):
        pipeline = {"stages": stages, "num_microbatches": 2}
        for found in ranks(stages)(of_metrics, pipeline, make, group=False):
            assert_same(found, expected)


class OfTheRoot(OfAMetric):
    """No number makes the roots of its micro-batches that of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = MeanSquaredError(squared=False).set_dtype(torch.float64)


def test_a_loss_that_a_metric_gives_and_that_is_no_sum_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match="what training_step returns is made of sums over samples in another way"
    ):
        of_metrics({"stages": 1, "num_microbatches": 2}, OfTheRoot)


class CoversWhereMasked(Regression):
    """Compares targets with outputs, of which Python asks placeholders first, and reads whether any counts."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = MeanMetric(), MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.validation_step(batch, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        out, mask = self.net(batch[0]), batch[1][:, 0] > 0
        at_least, less = batch[1] >= out, batch[1].lt(other=out)
        if mask.any():
            self.above.update(at_least[mask].float())
            self.below.update(less[mask].float())
        self.log("above", self.above)
        self.log("below", self.below)


@pytest.mark.parametrize("stages", [1, 2])
def test_targets_may_be_compared_with_outputs(ranks: Ranks, stages: int) -> None:
    expected = fit(None, CoversWhereMasked)
    for found in ranks(stages)(fit, {"stages": stages, "num_microbatches": 2}, CoversWhereMasked):
        assert_same(found, expected)


class CoversEach(CoversWhereMasked):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inside = (self.net(batch[0]) - batch[1]).abs() < 1
        for column in range(TARGETS):
            chosen = batch[1][:, column] > 0.6
            if chosen.any():
                self.above.update(inside[chosen, column].float())
        self.log("above", self.above)


def test_a_last_batch_of_one_sample_is_nothing_to_warn_of() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = trainer({"stages": 1, "num_microbatches": 2}, max_epochs=1, num_sanity_val_steps=0)
        run.fit(CoversEach(), loader(16), loader(17, seed=4))
    assert not [one for one in said if "micro-batch" in str(one.message)]
