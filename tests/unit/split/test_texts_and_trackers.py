"""A number that is written into a text, and metrics that come during a run, as a tracker makes them."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torchmetrics import Metric, MetricTracker

from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")


class Teaches(Regression):
    """What comes after a text is seen, too: a teacher's weights move once a batch."""

    def __init__(self):
        super().__init__()
        self.teacher, self.said = copy.deepcopy(self.net).requires_grad_(False), []

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = mse_loss(out, batch[1]) + mse_loss(out, self.teacher(batch[0]))
        self.said.append(f"{loss:.4f} of {out.detach().abs().max():.3f}")
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        return loss


class RootOfMean(Metric):
    """Of each update, so that it matters how often there is one."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("number", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, found, expected):
        self.total += (found - expected).square().mean().sqrt()
        self.number += 1

    def compute(self):
        return self.total / self.number


class Tracks(Teaches):
    """Holds another metric in each epoch."""

    def __init__(self):
        super().__init__()
        self.tracked = MetricTracker(RootOfMean(), maximize=False)

    def on_validation_epoch_start(self):
        self.tracked.increment()

    def validation_step(self, batch, batch_idx):
        self.tracked.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log("best", self.tracked.best_metric())
        self.log("now", self.tracked.compute())


def fitted(pipeline, kind):
    module, run = kind(), trainer(pipeline, max_epochs=2)
    run.fit(module, loader(samples=30), loader(samples=20, seed=4))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logged), module.said


class ByPython(Teaches):
    """Functions of Python on each element, which read the memory of a tensor."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        clipped = out.detach().clone().apply_(lambda value: min(value, 0.3))
        clipped.map_(batch[1], lambda value, target: value - target)
        self.log("clipped", clipped.mean(), on_step=True, on_epoch=True)
        return mse_loss(out, batch[1]) + (out * clipped).mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Teaches, Tracks, ByPython])
def test_texts_and_trackers_are_one_devices(kind, way):
    (found, said), (expected, theirs) = fitted(WAYS[way], kind), fitted(None, kind)
    assert_same(found, expected)
    assert said == theirs


class Remembers(Teaches):
    """Rows of an array at given places, beside weights that follow others: no rule is found when both are tried."""

    def __init__(self):
        super().__init__()
        self.rows = np.ones(30)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        away = (self.teacher(batch[0]) - out).detach().abs().mean(1)
        self.rows[batch_idx * 8 : batch_idx * 8 + len(away)] = away.numpy()
        self.log("largest", away.max(), on_step=True, on_epoch=True)
        self.teacher.load_state_dict(self.net.state_dict())
        return mse_loss(out, batch[1] + self.teacher(batch[0]))


@pytest.mark.parametrize("way", WAYS)
def test_states_that_follow_by_no_rule_are_one_devices_or_warned_of(way, recwarn):
    (found, _), (expected, _) = fitted(WAYS[way], Remembers), fitted(None, Remembers)
    if not [one for one in recwarn if "from the value before" in str(one.message)]:
        assert_same(found, expected)


class EndsEarly(Teaches):
    """A line that needs values of layers, and what the step does after it."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = mse_loss(out, batch[1]) + mse_loss(out, self.teacher(batch[0]))
        out.detach().untyped_storage().tolist()
        self.optimizers().param_groups[0]["lr"] *= 0.9
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        return loss


def test_what_comes_after_a_line_that_needs_values_is_warned_of():
    with pytest.warns(
        UserWarning, match=r"has changed 'optimizer 0, group 0: lr'.*teacher.0.weight.*micro-b"
    ):
        fitted(WAYS["four"], EndsEarly)


class Holder:
    def __init__(self):
        self.own, self.several = RootOfMean(), [RootOfMean()]


class HeldByAnObject(Tracks):
    def __init__(self):
        super().__init__()
        self.holder = Holder()

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.tracked.update(out, batch[1])
        self.holder.own.update(out, batch[1])
        self.holder.several[0].update(out, 2 * batch[1])

    def on_validation_epoch_end(self):
        self.log("own", self.holder.own.compute())
        self.log("several", self.holder.several[0].compute())


@pytest.mark.parametrize("way", WAYS)
def test_metrics_that_an_object_holds_are_one_devices(way):
    assert_same(fitted(WAYS[way], HeldByAnObject)[0], fitted(None, HeldByAnObject)[0])
