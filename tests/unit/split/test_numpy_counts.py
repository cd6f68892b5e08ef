"""NumPy arrays that a step writes in place: confusion matrices, histograms, histories, banks."""

import numpy
import pytest
import torch
from lightning.pytorch import Callback
from torch.nn.functional import mse_loss

from tests.ranks.lightning_cases import TARGETS, Regression, assert_same, loader, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")

WAYS = {
    "one": {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 1},
    "two": {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2},
    "three": {"stages": 1, "schedule": "1F1B", "num_microbatches": 3},
}
everywhere = numpy.zeros(TARGETS)


class Counts(Regression):
    """What it has counted is noted after each batch."""

    def __init__(self):
        super().__init__()
        self.counts = numpy.zeros((TARGETS, TARGETS), dtype=numpy.int64)
        self.noted = []

    def training_step(self, batch, batch_idx):
        made = self.net(batch[0])
        self.count(made.detach(), batch, batch_idx)
        return mse_loss(made, batch[1])

    def count(self, made, batch, batch_idx):
        for target, guess in zip(batch[1].argmax(1).tolist(), made.argmax(1).tolist(), strict=True):
            self.counts[target, guess] += 1

    def counted(self):
        return self.counts

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.noted.append(torch.tensor(self.counted()))

    def validation_step(self, batch, batch_idx):
        pass


class EmptiedEachEpoch(Counts):
    def on_train_epoch_end(self):
        self.counts[:] = 0


class AnewEachEpoch(Counts):
    def on_train_epoch_start(self):
        self.counts = numpy.zeros((TARGETS, TARGETS), dtype=numpy.int64)


class OfTargetsAlone(Counts):
    def count(self, made, batch, batch_idx):
        numpy.add.at(self.counts, batch[1].argmax(1).numpy(), 1)


class BeforeTheUnits(Counts):
    def training_step(self, batch, batch_idx):
        self.counts[0] += len(batch[0])
        return mse_loss(self.net(batch[0]), batch[1])


class InADictionary(Counts):
    def __init__(self):
        super().__init__()
        self.held = {"matrix": self.counts, "sums": [numpy.zeros(TARGETS)]}

    def count(self, made, batch, batch_idx):
        super().count(made, batch, batch_idx)
        self.held["sums"][0] += made.sum(0).numpy()

    def counted(self):
        return numpy.concatenate([self.counts.sum(0), self.held["sums"][0]])


class Meter:
    def __init__(self):
        self.sums = numpy.zeros(2)

    def update(self, values):
        self.sums += values.sum().item(), len(values)


class InAnObject(Counts):
    def __init__(self):
        super().__init__()
        self.meter = Meter()

    def count(self, made, batch, batch_idx):
        self.meter.update(made)

    def counted(self):
        return self.meter.sums


class OfAGlobal(Counts):
    def __init__(self):
        super().__init__()
        everywhere[:] = 0

    def count(self, made, batch, batch_idx):
        everywhere[:] += made.sum(0).numpy()

    def counted(self):
        return everywhere


class MovingAverage(Counts):
    def __init__(self):
        super().__init__()
        self.mean = numpy.zeros(TARGETS)

    def count(self, made, batch, batch_idx):
        self.mean *= 0.9
        self.mean += 0.1 * made.mean(0).numpy()

    def counted(self):
        return self.mean


class Largest(MovingAverage):
    def count(self, made, batch, batch_idx):
        numpy.maximum(self.mean, made.amax(0).numpy(), out=self.mean)


class AHistory(MovingAverage):
    def __init__(self):
        super().__init__()
        self.mean, self.at = numpy.zeros(50), 0

    def count(self, made, batch, batch_idx):
        self.mean[self.at] = mse_loss(made, batch[1]).item()
        self.at += 1


class WeighsByCounts(Counts):
    """The next batch reads what this one has counted."""

    def training_step(self, batch, batch_idx):
        made = self.net(batch[0])
        rare = torch.from_numpy(1.0 / (1.0 + self.counts.sum(0)))
        self.count(made.detach(), batch, batch_idx)
        return (rare * (made - batch[1]) ** 2).mean()


class FromTheThirdBatch(Counts):
    def count(self, made, batch, batch_idx):
        if self.global_step > 2:
            super().count(made, batch, batch_idx)


class WeighsByABuffer(Counts):
    """Tensors that are made of arrays: counts of the batch are added before its own loss is weighed by them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(TARGETS, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        made = self.net(batch[0])
        self.seen += torch.from_numpy(numpy.bincount(batch[1].argmax(1).numpy(), minlength=TARGETS))
        return ((made - batch[1]) ** 2 / (1.0 + self.seen)).mean()

    def counted(self):
        return self.seen.clone().numpy()


MODULES = [
    Counts, EmptiedEachEpoch, AnewEachEpoch, OfTargetsAlone, BeforeTheUnits, InADictionary, InAnObject, OfAGlobal,
    MovingAverage, Largest, AHistory, WeighsByCounts, FromTheThirdBatch,
    WeighsByABuffer,
]  # fmt: skip


def fitted(pipeline, make, **options):
    module, run = make(), trainer(pipeline, **options)
    run.fit(module, loader(), loader(seed=4))
    return weights(module), module.noted


def check(found, expected):
    assert_same((found[0], {}), (expected[0], {}))
    assert len(found[1]) == len(expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MODULES)
def test_counts_in_an_array_are_one_devices(make, way):
    check(fitted(WAYS[way], make), fitted(None, make))


class CountsPredictions(Callback):
    """Its array is filled by the step."""

    def __init__(self):
        self.matrix = numpy.zeros((TARGETS, TARGETS))


class OfACallback(Counts):
    def count(self, made, batch, batch_idx):
        self.trainer.callbacks[0].matrix[batch[1].argmax(1).numpy(), made.argmax(1).numpy()] += 1

    def counted(self):
        return self.trainer.callbacks[0].matrix


def test_an_array_of_a_callback_is_one_devices():
    found = fitted(WAYS["one"], OfACallback, callbacks=[CountsPredictions()])
    check(found, fitted(None, OfACallback, callbacks=[CountsPredictions()]))


class InValidation(Regression):
    def __init__(self):
        super().__init__()
        self.matrix = numpy.zeros((TARGETS, TARGETS))

    def validation_step(self, batch, batch_idx):
        for target, guess in zip(
            batch[1].argmax(1).tolist(), self.net(batch[0]).argmax(1).tolist(), strict=True
        ):
            self.matrix[target, guess] += 1

    def on_validation_epoch_end(self):
        self.log_dict({"hits": self.matrix.trace(), "seen": self.matrix.sum()})
        self.matrix[:] = 0


@pytest.mark.parametrize("way", WAYS)
def test_a_matrix_of_a_validation_is_one_devices(way):
    logs = []
    for pipeline in (WAYS[way], None):
        module, run = InValidation(), trainer(pipeline)
        run.fit(module, loader(), loader(seed=4))
        logs.append({name: float(value) for name, value in run.callback_metrics.items()})
    assert logs[0] == pytest.approx(logs[1], rel=1e-10)
    assert logs[0]["seen"] == 22


def over_ranks(pipeline):
    return [fitted(pipeline, make) for make in (Counts, WeighsByCounts, InAnObject)]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_rank_has_what_was_counted(ranks, microbatches):
    expected = over_ranks(None)
    for on_rank in ranks(2)(over_ranks, {"stages": 2, "num_microbatches": microbatches}, group=False):
        for one, other in zip(on_rank, expected, strict=True):
            check(one, other)
