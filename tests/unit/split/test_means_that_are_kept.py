"""Means over a mask that a step keeps in a list, a number or an average: those of the batch, as in the logs."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.ranks.lightning_cases import Regression, trainer, weights
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")


class Keeps(Regression):
    """The first batch leaves no target out; later ones leave out other numbers in each micro-batch."""

    def __init__(self):
        super().__init__()
        self.losses, self.read, self.pairs = [], [], []
        self.average, self.latest = 0.0, 0.0
        self.register_buffer("decayed", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        x, classes = batch
        out = self.net(x)
        loss = cross_entropy(out, classes)
        kept = classes >= 0
        own = (out.square().mean(1) * kept).sum() / kept.sum()
        self.losses.append(loss.detach())
        self.read.append(own.item())
        self.pairs.append((loss.detach(), len(x)))
        self.average = 0.9 * self.average + 0.1 * own.item()
        self.decayed = 0.9 * self.decayed + 0.1 * loss.detach()
        self.latest = loss.detach()
        return loss


def batches():
    generator = torch.Generator().manual_seed(3)
    made = []
    for left_out in (0, 0, 1, 5, 3, 6, 2):
        classes = torch.randint(0, 3, (8,), generator=generator)
        classes[:left_out] = -100
        made.append((torch.randn(8, 6, generator=generator, dtype=torch.float64), classes))
    return DataLoader(made, batch_size=None)


def fitted(pipeline):
    module, run = Keeps(), trainer(pipeline, max_epochs=2, limit_val_batches=0)
    run.fit(module, batches())
    kept = [*module.losses, *module.read, module.average, module.latest, module.decayed]
    return weights(module), [float(one) for one in kept], [float(one) for one, _ in module.pairs]


@pytest.mark.parametrize("way", WAYS)
def test_means_that_are_kept_are_one_devices(way):
    (own, kept, pairs), (expected, there, theirs) = fitted(WAYS[way]), fitted(None)
    for name, value in expected.items():
        torch.testing.assert_close(own[name], value, rtol=1e-10, atol=1e-10, msg=name)
    assert kept == pytest.approx(there, rel=1e-9)
    assert pairs == pytest.approx(theirs, rel=1e-9)


class KeepsMore(Regression):
    """Medians in a list, in lists of a dictionary and in a list of lists; an array; a text."""

    def __init__(self):
        super().__init__()
        self.medians, self.by_class, self.by_place = [], {}, [[], []]
        self.worst, self.text = 0.0, ""
        self.histogram = np.zeros(3)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = cross_entropy(out, batch[1])
        self.keep((out.detach() - 1).abs(), batch_idx)
        return loss

    def validation_step(self, batch, batch_idx):
        self.keep(self.net(batch[0]).abs(), batch_idx)

    def keep(self, away, batch_idx):
        self.medians.append(away.median())
        self.by_class.setdefault(batch_idx % 2, []).append(away.median().item())
        self.by_place[batch_idx % 2].append(float(away.max()))
        self.worst = max(self.worst, float(away.median()))
        self.text = f"{float(away.median()):.6f}"
        self.histogram += np.bincount([int(away.median() > 0.5)], minlength=3)


def kept_more(pipeline):
    module, run = KeepsMore(), trainer(pipeline, max_epochs=2)
    run.fit(module, batches(), batches())
    lists = [module.medians, *module.by_class.values(), *module.by_place, [module.worst]]
    return [float(one) for numbers in lists for one in numbers], module.text, module.histogram.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_what_no_rule_puts_together_is_that_of_the_batch_as_one(way):
    (numbers, *others), (expected, *theirs) = kept_more(WAYS[way]), kept_more(None)
    assert numbers == pytest.approx(expected, rel=1e-9)
    assert others == theirs
