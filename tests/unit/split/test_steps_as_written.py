"""Steps as users write them: numbers of one device, and no warning."""

import math
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, trainer, weights
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")
SAMPLES = 26


class Written(Regression):
    def training_step(self, batch, batch_idx):
        loss = self.step(self.net(batch[0]), *batch[1:], batch_idx)
        self.log("loss", loss)
        return loss

    def kept(self):
        return []


class AtLeastOne(Written):
    def step(self, out, y, mask, place, index):
        return ((out - y).square().mean(1) * mask).sum() / mask.sum().clamp(min=1)


class AtLeastOneByTorch(Written):
    def step(self, out, y, mask, place, index):
        return (out - y).square().mean(1)[mask].sum() / torch.clamp(mask.sum(), min=1.0)


class NoneIfNothing(Written):
    def step(self, out, y, mask, place, index):
        total, count = ((out - y).square().mean(1) * mask).sum(), mask.sum()
        return torch.where(count > 0, total / count.clamp(min=1), total * 0)


class ByTheSpread(Written):
    def step(self, out, y, mask, place, index):
        return mse_loss(out, y) / y.var()


class Counts(Written):
    def __init__(self):
        super().__init__()
        self.tokens, self.right = 0, {"near": 0, "all": 0}

    def step(self, out, y, mask, place, index):
        self.tokens += int(mask.sum())
        self.right["near"] += int(((out - y).abs().mean(1) < 1).sum())
        self.right["all"] += len(out)
        self.log("tokens", float(self.tokens))
        self.log("near", self.right["near"] / self.right["all"])
        return mse_loss(out, y)

    def kept(self):
        return [self.tokens, *self.right.values()]


class Perplexity(Written):
    def __init__(self):
        super().__init__()
        self.nll, self.tokens = 0.0, 0

    def step(self, out, y, mask, place, index):
        self.nll += float(((out - y).square().mean(1) * mask).sum())
        self.tokens += int(mask.sum())
        self.log("perplexity", math.exp(self.nll / max(1, self.tokens)))
        return mse_loss(out, y)

    def kept(self):
        return [self.nll, self.tokens]


class LogsInSomeBatches(Written):
    def step(self, out, y, mask, place, index):
        if index % 2 == 0:
            self.log("largest", out.abs().mean())
        return mse_loss(out, y)


class Anchored(Written):
    """As elastic weight consolidation does from the second epoch on."""

    anchors = ()

    def step(self, out, y, mask, place, index):
        pairs = zip(self.net.parameters(), self.anchors, strict=False)
        return mse_loss(out, y) + sum(0.1 * (weight - anchor).square().sum() for weight, anchor in pairs)

    def on_train_epoch_end(self):
        self.anchors = [weight.detach().clone() for weight in self.net.parameters()]


class Prioritized(Written):
    """Priorities of samples in an array, beside a network that is synchronized in some batches."""

    synchronized = 0

    def __init__(self):
        super().__init__()
        self.priorities = np.ones(SAMPLES)
        self.target = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y, _, place = batch
        difference = (self.net(x) - y - 0.1 * self.target(x)).abs().mean(1)
        self.priorities[place.numpy()] = difference.detach().numpy()
        self.log("largest", difference.max())
        if batch_idx % 2 == self.synchronized:
            self.target.load_state_dict(self.net.state_dict())
        return difference.square().mean()

    def kept(self):
        return self.priorities.tolist()


class PrioritizedLater(Prioritized):
    synchronized = 1


class Centers(Written):
    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.zeros(TARGETS, TARGETS, dtype=torch.float64))

    def step(self, out, y, mask, place, index):
        classes = y.argmax(1)
        loss = (out - self.centers[classes]).square().mean()
        with torch.no_grad():
            for one in classes.unique():
                self.centers[one] -= 0.1 * (self.centers[one] - out[classes == one].mean(0))
        return loss

    def kept(self):
        return self.centers.flatten().tolist()


class Table(Written):
    """Rows of a table that belong to the samples of a batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(SAMPLES, TARGETS, dtype=torch.float64))

    def step(self, out, y, mask, place, index):
        loss = mse_loss(out, y) + 0.1 * mse_loss(out, self.table[place])
        self.table[place] = 0.7 * self.table[place] + 0.3 * out.detach()
        return loss

    def kept(self):
        return self.table.flatten().tolist()


class Remembered(Table):
    """Early-learning regularization: a sample reads what it has just written of itself."""

    def step(self, out, y, mask, place, index):
        likely = out.softmax(1).clamp(1e-4, 1 - 1e-4)
        self.table[place] = 0.7 * self.table[place] + 0.3 * (likely / likely.sum(1, keepdim=True)).detach()
        return mse_loss(out, y) + (1 - (self.table[place] * likely).sum(1)).log().mean()


class MissingLabels(Written):
    def step(self, out, y, mask, place, index):
        y = torch.where(mask[:, None], y, torch.nan)
        self.log("error", (out - y).abs().nanmean())
        known = ~y.isnan()
        return mse_loss(out[known], y[known])


class MissingSummed(Written):
    def step(self, out, y, mask, place, index):
        return torch.nansum(torch.where(mask[:, None], (out - y) ** 2, torch.nan)) / mask.sum().clamp(min=1)


class Annealed(Written):
    """What a layer gives is scaled by a number that the step changes, before the next layer."""

    def __init__(self):
        super().__init__()
        self.steps, self.strength = 0, 1.0
        self.register_buffer("average", torch.ones((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        hidden = self.net[1](self.net[0](batch[0])) * (1 + self.steps / 10) / self.average.clone()
        loss = mse_loss(self.net[4:](self.net[2:4](hidden.div(self.strength))), batch[1])
        self.steps += 1
        self.strength = max(0.1, self.strength * 0.9)
        self.average = 0.9 * self.average + 0.1 * batch[0].abs().mean()
        return loss

    def kept(self):
        return [self.steps, self.strength, float(self.average)]


STEPS = [
    AtLeastOne, AtLeastOneByTorch, NoneIfNothing, ByTheSpread, Counts, LogsInSomeBatches, Anchored, Prioritized,
    PrioritizedLater, Centers, Table, Remembered, MissingLabels, MissingSummed, Annealed, Perplexity,
]  # fmt: skip


class Logged(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        self.seen += [trainer.callback_metrics[name].item() for name in sorted(trainer.callback_metrics)]


def batches():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(SAMPLES, TARGETS, generator=generator, dtype=torch.float64)
    mask = torch.rand(SAMPLES, generator=generator) > 0.4
    mask[:2] = False  # a micro-batch of which nothing counts
    return DataLoader(TensorDataset(x, y, mask, torch.arange(SAMPLES)), batch_size=8)


def fitted(pipeline, step):
    module, logged = step(), Logged()
    trainer(pipeline, max_epochs=2, limit_val_batches=0, callbacks=[logged]).fit(module, batches())
    return weights(module), logged.seen, module.kept()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_that_of_one_device_without_a_word(step, way):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, logged, kept = fitted(WAYS[way], step)
    assert not [str(one.message) for one in said if "micro-batch" in str(one.message)]
    expected, logs, left = fitted(None, step)
    assert_same((found, {}), (expected, {}))
    assert logged == pytest.approx(logs, rel=1e-6, nan_ok=True)
    assert kept == pytest.approx(left, rel=1e-6)


class HalvedByASum(Written):
    """What it has added decides what the loss is: a micro-batch adds its own samples alone."""

    def __init__(self):
        super().__init__()
        self.samples = 0

    def step(self, out, y, mask, place, index):
        self.samples += len(out)
        loss = mse_loss(out, y)
        return loss * 0.5 if self.samples > 20 else loss


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_a_sum_decides_is_warned_of(way):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fitted(WAYS[way], HalvedByASum)
    texts = [str(one.message) for one in said if "micro-batches" in str(one.message)]
    assert len(texts) == 1 and texts[0].startswith("what training_step returns for a batch is ")


class LeavesOut(Written):
    """A batch whose loss is not finite, which one of its micro-batches shows."""

    def training_step(self, batch, batch_idx):
        x, y, _, place = batch
        each = (self.net(x) - y).square().mean(1)
        loss = torch.where(place == 9, torch.inf, each).mean()
        return loss if torch.isfinite(loss) else None


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_without_a_finite_loss_is_left_out(way):
    with warnings.catch_warnings(action="ignore"):
        found, expected = fitted(WAYS[way], LeavesOut)[0], fitted(None, LeavesOut)[0]
    assert_same((found, {}), (expected, {}))


class EverySecond(Written):
    """Trains nothing on every second batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    def step(self, out, y, mask, place, index):
        return mse_loss(out, y)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_said_of_the_weights_of_a_batch_without_a_loss(way):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = fitted(WAYS[way], EverySecond)[0]
    texts = [str(one.message) for one in said if "micro-batch" in str(one.message)]
    assert len(texts) == 1 and "returned no loss for any of a batch's" in texts[0]
    assert_same((found, {}), (fitted(None, EverySecond)[0], {}))
