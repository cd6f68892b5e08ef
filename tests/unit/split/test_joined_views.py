"""Rows that have each sample several times: joined views, joined crops, tokens, whatever their order."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize
from torchmetrics import CosineSimilarity

from lightning_pipeline.model.tensors import cut_in_blocks, joined_in_blocks
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, loader, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")

STAGED = {"stages": 1, "stages_per_rank": 2}
WAYS = {
    "two": {**STAGED, "schedule": "Interleaved1F1B", "num_microbatches": 2},
    "four": {**STAGED, "schedule": "Interleaved1F1B", "num_microbatches": 4},
    "one stage": {"stages": 1, "schedule": "1F1B", "num_microbatches": 3},
}
OVER_BATCH = {
    "two": {**STAGED, "schedule": "LoopedBFS", "num_microbatches": 2, "loss_over_batch": True},
    "three": {"stages": 1, "schedule": "GPipe", "num_microbatches": 3, "loss_over_batch": True},
}


class Views(Regression):
    """Each sample in several views."""

    factors = (1.0, 1.1)

    def joined(self, x):
        return torch.cat([x * factor for factor in self.factors])

    def views(self, x):
        return self.net(self.joined(x)).chunk(len(self.factors))

    def training_step(self, batch, batch_idx):
        loss = self.compared(*self.views(batch[0]))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def compared(self, one, other):
        z = normalize(torch.cat([one, other]), dim=1)
        alike = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return cross_entropy(alike, torch.arange(len(z)).roll(len(one)))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.compared(*self.views(batch[0])))


class ThreeCrops(Views):
    factors = (1.0, 1.1, 0.9)

    def compared(self, one, other, third):
        return super().compared(one, other) + super().compared(other, third)


class SamplesFirst(Views):
    """Views of a sample stand next to each other."""

    def joined(self, x):
        return torch.stack([x * factor for factor in self.factors], 1).flatten(0, 1)

    def views(self, x):
        return self.net(self.joined(x)).unflatten(0, (-1, len(self.factors))).unbind(1)


class CropsOfTokens(Views):
    """Crops, then samples, then tokens."""

    def joined(self, x):
        tokens = torch.stack([x, x.roll(1, 1)], 1)
        return torch.cat([tokens * factor for factor in self.factors]).flatten(0, 1)

    def views(self, x):
        crops = self.net(self.joined(x)).chunk(len(self.factors))
        return [crop.unflatten(0, (-1, 2)).mean(1) for crop in crops]


class NoisyViews(Views):
    """Another draw for each view, too small to count for much; joined in another order it would be far off."""

    def joined(self, x):
        return torch.cat([x * factor + 1e-4 * torch.randn_like(x) for factor in self.factors])


class Predicted(Views):
    """A second part is given what the first made of all views."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(TARGETS, 8), nn.Tanh(), nn.Linear(8, TARGETS)).double()

    def views(self, x):
        made = normalize(self.net(self.joined(x)), dim=1)
        return self.head(made).chunk(len(self.factors))


def fitted(pipeline, make, **options):
    module, run = make(), trainer(pipeline, **options)
    run.fit(module, loader(), loader(seed=4))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("way", OVER_BATCH)
@pytest.mark.parametrize("make", [Views, ThreeCrops, SamplesFirst, CropsOfTokens, Predicted])
def test_a_loss_over_the_batch_has_the_views_of_all_samples(make, way):
    assert_same(fitted(OVER_BATCH[way], make), fitted(None, make))


@pytest.mark.parametrize("way", OVER_BATCH)
def test_views_that_are_drawn_are_joined_likewise(way):
    assert_same(fitted(OVER_BATCH[way], NoisyViews), fitted(None, Views), tolerance=1e-2)


class JoinsInside(nn.Module):
    """A layer that joins views itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES, 8, dtype=torch.float64))

    def forward(self, x):
        return torch.cat([x, 1.1 * x]) @ self.weight


class ViewsOfALayer(Views):
    def __init__(self):
        super().__init__()
        self.net[0] = JoinsInside()

    def joined(self, x):
        return x


def test_views_that_a_layer_joins_are_warned_of():
    run = trainer(OVER_BATCH["two"], max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match=r"units \['net.6'\] return other rows than one for each sample"):
        run.fit(ViewsOfALayer(), loader(), loader(seed=4))


def over_ranks(pipeline):
    return fitted(pipeline, Views), fitted(pipeline, Predicted)


def test_ranks_join_the_views_of_all_samples(ranks):
    pipeline = {"stages": 2, "schedule": "GPipe", "num_microbatches": 3, "loss_over_batch": True}
    expected = over_ranks(None)
    for on_rank in ranks(2)(over_ranks, pipeline, group=False):
        for one, other in zip(on_rank, expected, strict=True):
            assert_same(one, other)


class Pairs(Views):
    """Each sample's views are compared with each other alone, in all that a step tells and leaves behind."""

    def __init__(self):
        super().__init__()
        self.alike = CosineSimilarity(reduction="mean")
        self.register_buffer("center", torch.zeros(1, TARGETS, dtype=torch.float64))
        self.features = []

    def compared(self, one, other):
        self.features.append(torch.cat([one, other]).detach())
        self.last = torch.cat([one, other]).detach()
        self.alike.update(one.detach(), other.detach())
        loss = mse_loss(one - self.center, other)
        with torch.no_grad():
            self.center.mul_(0.9).add_(torch.cat([one, other]).mean(0, keepdim=True), alpha=0.1)
        self.log("pairs", cosine_similarity(one, other).mean())
        return loss

    def on_train_epoch_end(self):
        self.log("alike", self.alike.compute())
        self.alike.reset()
        halves = [rows.chunk(2) for rows in self.features]
        self.log("apart", sum((one - other).abs().sum() for one, other in halves))
        self.log("last", (self.last[: len(self.last) // 2] - self.last[len(self.last) // 2 :]).abs().sum())
        self.features.clear()

    def validation_step(self, batch, batch_idx):
        pass


@pytest.mark.parametrize("way", WAYS)
def test_what_a_step_leaves_of_joined_views_is_one_devices(way):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has left rows of another number of samples.*")
        found = fitted(WAYS[way], Pairs)
    assert_same(found, fitted(None, Pairs))


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("dimension", [0, 1])
def test_what_is_joined_is_cut_again(blocks, dimension):
    sizes = (2, 1, 3)
    parts = [torch.randn(6 * size, 6 * size, FEATURES).narrow(1 - dimension, 0, 6) for size in sizes]
    whole = joined_in_blocks(parts, dimension, blocks)
    start = 0
    for part in parts:
        length = part.shape[dimension]
        torch.testing.assert_close(cut_in_blocks(whole, dimension, blocks, start, length), part)
        start += length
