"""Metrics that a step updates by how many samples it is given: one device has the batch's."""

import warnings

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanMetric

from tests.ranks.lightning_cases import FEATURES, Regression, trainer

pytestmark = pytest.mark.usefixtures("no_group_is_left")

WAYS = {
    "two stages": {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2},
    "three": {"stages": 1, "schedule": "1F1B", "num_microbatches": 3},
}


class ByMany(Regression):
    """A batch of 8 or 4 has more than one sample; the last has one in a micro-batch of three."""

    def __init__(self):
        super().__init__()
        self.of_training, self.of_validation = self.made(), self.made()

    def made(self):
        return MeanAbsoluteError().set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        return self.both(batch, self.of_training)

    def validation_step(self, batch, batch_idx):
        self.both(batch, self.of_validation)

    def both(self, batch, metric):
        out = self.net(batch[0])
        if self.holds(batch[0]):
            self.give(metric, out[:, 0], batch[1][:, 0])
        return mse_loss(out, batch[1])

    def holds(self, x):
        return len(x) > 1

    def give(self, metric, out, y):
        metric.update(out, y)

    def on_train_epoch_end(self):
        self.log("error", self.of_training.compute())
        self.of_training.reset()

    def on_validation_epoch_end(self):
        self.log("val_error", self.of_validation.compute())
        self.of_validation.reset()


class ByOne(ByMany):
    def holds(self, x):
        return x.squeeze(0).dim() > 1


class Called(ByMany):
    def give(self, metric, out, y):
        metric(out, y)


class Means(ByMany):
    def made(self):
        return MeanMetric().set_dtype(torch.float64)

    def give(self, metric, out, y):
        metric.update((out - y).abs().mean().detach(), len(y))


class Otherwise(ByMany):
    def both(self, batch, metric):
        out = self.net(batch[0])
        if len(batch[0]) == 1:
            metric.update(out[0, 0] * 0, batch[1][0, 0] * 0)
        else:
            metric.update(out[:, 0], batch[1][:, 0])
        return mse_loss(out, batch[1])


class Logged(ByMany):
    """The object itself."""

    def both(self, batch, metric):
        loss = super().both(batch, metric)
        if self.holds(batch[0]):
            self.log(
                "val_error" if metric is self.of_validation else "error", metric, on_step=False, on_epoch=True
            )
        return loss

    def on_train_epoch_end(self):
        pass

    on_validation_epoch_end = on_train_epoch_end


class ByEight(ByMany):
    """No micro-batch has as many."""

    def holds(self, x):
        return len(x) == 8


def batches():
    x = torch.randn(12, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(x, x[:, :3] + 3 * (torch.arange(12) > 7)[:, None]), batch_size=8)


def logged(kind, pipeline):
    torch.manual_seed(3)
    run = trainer(pipeline, max_epochs=2)
    run.fit(kind(), batches(), batches())
    return {name: float(run.callback_metrics[name]) for name in ("error", "val_error")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ByMany, ByOne, Called, Means, Otherwise, Logged])
def test_it_is_given_what_one_device_gives_it(recwarn, kind, way):
    expected = logged(kind, None)
    recwarn.clear()
    assert logged(kind, WAYS[way]) == pytest.approx(expected, rel=1e-9)
    assert not [
        one for one in recwarn if "metric" in str(one.message).lower() and "given" in str(one.message)
    ]


def test_it_is_said_where_that_is_not_here():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logged(ByEight, WAYS["two stages"])
    assert any("something else by validation_step for the batch as one" in str(one.message) for one in caught)


class WithGradients(Regression):
    """The first batch is not cut, and the metric is called with values that have gradients."""

    def __init__(self):
        super().__init__()
        self.of_all = MeanAbsoluteError().set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.of_all(out, batch[1])
        return mse_loss(out, batch[1])


def test_a_metric_called_with_gradients_is_copied_all_the_same():
    found = []
    for pipeline in (None, WAYS["three"]):
        torch.manual_seed(3)
        module, data = WithGradients(), batches().dataset
        loader = DataLoader(data, batch_sampler=[[0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])
        trainer(pipeline, max_epochs=1, limit_val_batches=0).fit(module, loader)
        found.append(float(module.of_all.compute()))
    assert found[1] == pytest.approx(found[0], rel=1e-9)
