"""Losses in a loop over samples, as detectors have them: what each sample matches, over how many did in the batch."""

import warnings

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from tests.ranks.lightning_cases import Regression, assert_same, fit
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")


def anchors(out, y):
    """Boxes of the anchors that match, by an index that a mask picked."""
    found, total, matched = out.unsqueeze(-1) * torch.ones(2, dtype=out.dtype), 0.0, 0
    for mine, theirs in zip(found, y, strict=True):
        boxes = torch.stack([theirs, theirs + 1], 1)
        overlap = theirs[None] - (boxes[:, None] - boxes[None]).abs().sum(-1)
        best, index = overlap.max(1)
        kept = best > 0
        matched += int(kept.sum())
        total = total + (mine[kept] - boxes[index[kept]]).abs().sum()
    return total / max(matched, 1)


def hard_negatives(out, y):
    """Three times as many negatives as positives, those with the largest loss."""
    losses, positives = [], 0
    for mine, theirs in zip(out, y, strict=True):
        each, there = (
            binary_cross_entropy_with_logits(mine, (theirs > 0).double(), reduction="none"),
            theirs > 0,
        )
        hardest = each[~there].sort(descending=True).values[: 3 * int(there.sum())]
        losses.append(each[there].sum() + hardest.sum())
        positives += int(there.sum())
    return torch.stack(losses).sum() / max(positives, 1)


def clamped(out, y):
    """A hinge of what is made of one sample."""
    losses = [
        (mine[theirs > 0].sum() - theirs.sum()).clamp(min=0.1) for mine, theirs in zip(out, y, strict=True)
    ]
    return torch.stack(losses).mean()


def relative(out, y):
    """Offsets to the sample's own mean, of the places that are kept."""
    losses = [
        smooth_l1_loss(mine[theirs > 0] - mine.mean(), theirs[theirs > 0])
        for mine, theirs in zip(out, y, strict=True)
        if bool((theirs > 0).any())
    ]
    return sum(losses) / max(len(losses), 1)


class BySample(Regression):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def training_step(self, batch, batch_idx):
        loss = self.function(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", [anchors, hard_negatives, clamped, relative])
def test_a_loss_in_a_loop_over_samples_is_one_devices(function, way):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*micro-batch")
        found = fit(WAYS[way], lambda: BySample(function), max_epochs=2)
    assert_same(found, fit(None, lambda: BySample(function), max_epochs=2))
