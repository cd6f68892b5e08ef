"""torchmetrics objects that the module does not have: a callback's, and such as a hook makes."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric

from lightning_pipeline.errors import SplitError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Counts(Callback):
    """Is given the batches of each rank, which are the same on all stages."""

    def __init__(self) -> None:
        self.samples, self.mean, self.all = SumMetric(), MeanMetric(), CatMetric()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.samples.update(len(batch[0]))
        self.mean.update(batch[0].mean(), len(batch[0]))
        self.all.update(batch[1][:, 0])

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        found = {
            "samples": self.samples.compute(),
            "mean": self.mean.compute(),
            "rows": float(len(self.all.compute())),
        }
        pl_module.log_dict(found)
        for metric in (self.samples, self.mean, self.all):
            metric.reset()


class Makes(Regression):
    """A metric of its own in each epoch's end."""

    def on_validation_epoch_end(self) -> None:
        made = SumMetric()
        made.update(11.0)
        self.log("made", made.compute())


def logged(pipeline: dict[str, Any] | None) -> dict[str, float]:
    run = trainer(pipeline, max_epochs=1, callbacks=[Counts()])
    run.fit(Makes(), loader(24), loader(24, seed=4))
    names = ("samples", "mean", "rows", "made")
    return {name: float(run.callback_metrics[name]) for name in names}


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_metrics_that_no_module_has_count_each_sample_once(ranks: Ranks, stages: int, replicas: int) -> None:
    expected = logged(None) | {"made": 11.0 * replicas}  # as under DDP
    pipeline = {"stages": stages, "num_microbatches": 2, "data_parallel_size": replicas}
    for found in ranks(stages * replicas)(logged, pipeline, group=False):
        assert found == pytest.approx(expected, rel=1e-6)


class AskedByOne(Counts):
    """Computed where a file is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[float] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.written.append(float(self.samples.compute()))


def written(pipeline: dict[str, Any] | None) -> list[float]:
    asked = AskedByOne()
    trainer(pipeline, max_epochs=1, callbacks=[asked]).fit(Regression(), loader(24), loader(24, seed=4))
    return asked.written


def test_a_rank_may_ask_alone(ranks: Ranks) -> None:
    expected = written(None)
    assert expected
    assert ranks(2)(written, {"stages": 2, "num_microbatches": 2}, group=False) == [expected, []]


GLOBAL, COUNTED = MeanMetric(), MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})


class Updates(Regression):
    """Updates a metric in its step, and logs it at the end of the epoch."""

    def metric(self) -> Any:
        return GLOBAL

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        self.metric().update((outputs - batch[1]).detach().abs().mean(1))
        self.counted().update(1.0)
        return nn.functional.mse_loss(outputs, batch[1])

    def counted(self) -> Any:
        return COUNTED["sum"]

    def on_train_epoch_end(self) -> None:
        self.log_dict({"error": self.metric().compute(), "batches": self.counted().compute()})
        self.metric().reset()


class FromHook(Updates):
    """One that a hook makes."""

    def on_fit_start(self) -> None:
        self.made, self.made_too = MeanMetric(), SumMetric()

    def metric(self) -> Any:
        return self.made

    def counted(self) -> Any:
        return self.made_too


class FromStep(Updates):
    """One that the step makes where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Any = None
        self.by_name: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.made is None:
            self.made = MeanMetric()
        if "count" not in self.by_name:
            self.by_name["count"] = MetricCollection({"sum": SumMetric()})
        return super().training_step(batch, batch_idx)

    def metric(self) -> Any:
        return self.made

    def counted(self) -> Any:
        return self.by_name["count"]["sum"]


class FromData(LightningDataModule):
    """Has one."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanMetric()

    def train_dataloader(self) -> Any:
        return loader(22)


class OfData(Updates):
    """That of the data module."""

    def metric(self) -> Any:
        return self.trainer.datamodule.error


class Anew(FromStep):
    """Makes a metric in every step, which the module keeps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.made = MeanMetric()
        return super().training_step(batch, batch_idx)


class Members(Updates):
    """Those of a collection, called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.both = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("now", self.metric()(batch[1].abs().mean(1)))
        return super().training_step(batch, batch_idx)

    def metric(self) -> Any:
        return self.both["mean"]

    def counted(self) -> Any:
        return self.both["sum"]


class MembersOfPlain(Members):
    """Likewise, of one in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = {"both": self.both}
        del self.both

    def metric(self) -> Any:
        return self.plain["both"]["mean"]

    def counted(self) -> Any:
        return self.plain["both"]["sum"]


class InNewList(FromStep):
    """Makes one, in a list that is new, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.list = [MeanMetric()]
        self.list[0].update(1.0)
        return super().training_step(batch, batch_idx)


CASES = {
    kind.__name__: kind
    for kind in (Updates, FromHook, FromStep, OfData, Members, MembersOfPlain, Anew, InNewList)
}


def updated(pipeline: dict[str, Any] | None, kind: str) -> dict[str, float]:
    GLOBAL.reset()
    COUNTED.reset()
    run = trainer(pipeline, max_epochs=2)
    run.fit(CASES[kind](), datamodule=FromData())
    names = {"error", "batches", "now"} & run.callback_metrics.keys()
    return {name: float(run.callback_metrics[name]) for name in names}


@pytest.mark.parametrize("kind", ["Updates", "FromHook", "FromStep", "OfData", "Members", "MembersOfPlain"])
def test_metrics_that_a_step_updates_count_a_batch_once(ranks: Ranks, kind: str) -> None:
    expected = updated(None, kind)
    one_rank = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2}
    assert updated(one_rank, kind) == pytest.approx(expected, rel=1e-6)
    for found in ranks(2)(updated, {"stages": 2, "num_microbatches": 2}, kind, group=False):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["Anew", "InNewList"])
def test_a_metric_made_in_every_step_is_refused(kind: str) -> None:
    with pytest.raises(SplitError, match="makes a metric .MeanMetric. that the module keeps, in every batch"):
        updated({"stages": 1, "num_microbatches": 2}, kind)


class Copies(Updates):
    """Updates a copy that the step makes, as of a metric for one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanMetric()

    def metric(self) -> Any:
        return self.error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        copied = self.error.clone()
        copied.update(batch[1].abs().mean(1))
        return super().training_step(batch, batch_idx)


class Renews(Updates):
    """A hook makes another global metric for each epoch, which no trace has seen."""

    def on_train_epoch_start(self) -> None:
        RENEWED[:] = [MeanMetric()]

    def metric(self) -> Any:
        return RENEWED[0]


RENEWED: list[Any] = []
CASES |= {kind.__name__: kind for kind in (Copies, Renews)}


def test_a_copy_that_a_step_makes_is_its_own() -> None:
    expected = updated(None, "Copies")
    assert updated({"stages": 1, "num_microbatches": 2}, "Copies") == pytest.approx(expected, rel=1e-6)


def test_a_metric_that_no_trace_has_seen_is_refused() -> None:
    with pytest.raises(
        SplitError, match="a metric .MeanMetric. that the module does not have is updated by a step"
    ):
        updated({"stages": 1, "num_microbatches": 2}, "Renews")
