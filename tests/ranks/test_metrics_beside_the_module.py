"""torchmetrics objects that the module does not have: a callback's, and such as a hook makes."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback
from torchmetrics import CatMetric, MeanMetric, SumMetric

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Counts(Callback):
    """Is given the batches of each rank, which are the same on all stages."""

    def __init__(self) -> None:
        self.samples, self.mean, self.all = SumMetric(), MeanMetric(), CatMetric()
        self.ranks = MeanMetric()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.samples.update(len(batch[0]))
        self.mean.update(batch[0].mean(), len(batch[0]))
        self.all.update(batch[1][:, 0])
        self.ranks.update(float(trainer.global_rank))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        found = {
            "samples": self.samples.compute(),
            "mean": self.mean.compute(),
            "rows": float(len(self.all.compute())),
        }
        pl_module.log_dict(found | {"ranks": self.ranks.compute()})
        for metric in (self.samples, self.mean, self.all, self.ranks):
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
    names = ("samples", "mean", "rows", "made", "ranks")
    return {name: float(run.callback_metrics[name]) for name in names}


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_metrics_that_no_module_has_count_each_sample_once(ranks: Ranks, stages: int, replicas: int) -> None:
    expected = logged(None) | {"made": 11.0 * replicas}  # as under DDP
    expected["ranks"] = (stages * replicas - 1) / 2  # which each rank has its own of
    pipeline = {"stages": stages, "num_microbatches": 2, "data_parallel_size": replicas}
    for found in ranks(stages * replicas)(logged, pipeline, group=False):
        assert found == pytest.approx(expected, rel=1e-6)
