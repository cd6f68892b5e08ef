"""Losses divided by what the model decides: means over the samples that it finds hard, or sure."""

import warnings

import pytest
import torch
from torch.nn.functional import mse_loss

from lightning_pipeline.errors import SplitError
from tests.ranks.lightning_cases import assert_same, trainer, weights
from tests.unit.split.test_logged_as_one import WAYS
from tests.unit.split.test_steps_as_written import Written, batches, fitted

pytestmark = pytest.mark.usefixtures("no_group_is_left")


def hardest(out, y):
    """None in some micro-batches, and none in the last batch."""
    each = (out - y).square().mean(1)
    return each[each.detach() < 1.0].mean()


def hardest_if_any(out, y):
    each = (out - y).square().mean(1)
    kept = each.detach() < 1.0
    return each[kept].mean() if kept.any() else each.sum() * 0


def hardest_by_places(out, y):
    each = (out - y).square().mean(1)
    return each[(each.detach() < 1.5).nonzero().squeeze(1)].mean()


def self_paced(out, y):
    each = (out - y).square().mean(1)
    sure = (each.detach() < 1.0).double()
    return (sure * each).sum() / sure.sum().clamp(min=1)


def self_paced_softly(out, y):
    """Fewer than the least that is divided by, in micro-batches and in batches."""
    each = (out - y).square().mean(1)
    sure = 0.3 * torch.exp(-each.detach())
    return (sure * each).sum() / sure.sum().clamp(min=1)


def weighted_means(out, y):
    each = (out - y).square().mean(1)
    sure = torch.exp(-each.detach())
    return 0.5 * (sure * each).mean() / sure.mean()


def beside_little(out, y):
    each = (out - y).square().mean(1)
    sure = (each.detach() < 1.0).double()
    return (sure * each).sum() / (sure.sum() + 1e-8)


def by_a_number(out, y):
    each = (out - y).square().mean(1)
    sure = (each.detach() < 1.0).double()
    return (sure * each).sum() / max(sure.sum().item(), 1)


def what_is_a_number(out, y):
    each = (out - y).square().mean(1)
    return torch.where(each < 1.0, each, torch.full_like(each, torch.nan)).nanmean()


def repeated(out, y):
    """As predicted durations do: how many rows the batch has is known to no micro-batch."""
    return out.repeat_interleave(1 + (out.detach()[:, 0] > 0).long(), 0).square().mean()


def by_signs(out, y):
    """A divisor that is below 0 in some micro-batches."""
    each, weight = (out - y).square().mean(1), out.detach()[:, 0]
    return (weight * each).sum() / weight.sum()


def over_a_mean(out, y):
    each = (out - y).square().mean(1)
    sure = torch.exp(-each.detach())
    return 0.1 * (sure * each).sum() / sure.mean()


def by_classes(out, y):
    """Cross entropy of the samples whose loss is large, as segmentation has it."""
    each = torch.nn.functional.cross_entropy(out, y.argmax(1), reduction="none")
    return each[each.detach() > 0.8].mean()


DIVIDED = [
    hardest, hardest_if_any, hardest_by_places, self_paced, self_paced_softly, weighted_means, beside_little,
    by_a_number, what_is_a_number, repeated, by_classes, by_signs, over_a_mean,
]  # fmt: skip


class Divided(Written):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def step(self, out, y, mask, place, index):
        return self.function(out, y)


def said_of(made):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = made()
    return found, [text for one in said if "micro-batch" in (text := str(one.message))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", DIVIDED)
def test_a_loss_divided_by_what_the_model_decides_is_one_devices(function, way):
    (found, logged, _), said = said_of(lambda: fitted(WAYS[way], lambda: Divided(function)))
    assert not said
    (expected, logs, _), _ = said_of(lambda: fitted(None, lambda: Divided(function)))
    assert_same((found, {}), (expected, {}))
    assert logged == pytest.approx(logs, rel=1e-6, nan_ok=True)


def accumulated(pipeline):
    module = Divided(self_paced)
    trainer(pipeline, max_epochs=2, limit_val_batches=0, accumulate_grad_batches=2).fit(module, batches())
    return weights(module), {}


def test_batches_that_are_accumulated_have_each_their_own():
    assert_same(said_of(lambda: accumulated(WAYS["four"]))[0], said_of(lambda: accumulated(None))[0])


def over_ranks(pipeline):
    found = []
    for function in (hardest, self_paced):
        module = Divided(function)
        trainer(pipeline, max_epochs=1, limit_val_batches=0).fit(module, batches())
        found.append(weights(module))
    return found


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_every_stage_divides_by_it(ranks, schedule):
    expected, _ = said_of(lambda: over_ranks(None))
    pipeline = {"stages": 2, "num_microbatches": 4, "schedule": schedule}
    for on_rank in ranks(2)(over_ranks, pipeline, group=False):
        for mine, whole in zip(on_rank, expected, strict=True):
            assert_same((mine, {}), (whole, {}))


class Hooked(Divided):
    def on_fit_start(self):
        next(self.net.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))


def test_hooks_on_gradients_are_warned_of():
    _, said = said_of(lambda: fitted(WAYS["four"], lambda: Hooked(self_paced)))
    assert said and all("`register_hook` on a parameter" in one for one in said)


def beside_a_mean(out, y):
    return mse_loss(out, y) + hardest(out, y)


def over_few(out, y):
    """Of all samples over those that the model is sure of, of which a micro-batch has none."""
    each = (out - y).square().mean(1)
    return each.sum() / (each.detach() < 1.0).sum()


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (beside_a_mean, "from .*test_divisors_of_the_model.py"),
        (over_few, "where a micro-batch divides by nothing"),
    ],
)
def test_what_cannot_be_divided_at_the_end_is_refused(function, where):
    with pytest.raises(SplitError, match=f"cannot be followed {where}"):
        said_of(lambda: fitted(WAYS["four"], lambda: Divided(function)))


def of_nothing(out, y):
    each = (out - y).square().mean(1)
    kept = each.detach() < -1.0
    return (each * kept).sum() / kept.sum()


def test_a_batch_divided_by_nothing_is_left_out_where_gradients_are_looked_at():
    before = weights(Divided(of_nothing))
    found, _ = said_of(lambda: fitted({**WAYS["four"], "on_nonfinite": "skip"}, lambda: Divided(of_nothing)))
    assert_same((found[0], {}), (before, {}))


@pytest.mark.parametrize("way", WAYS)
def test_a_first_batch_divided_by_nothing_is_nan_as_on_one_device(way):
    (expected, *_), _ = said_of(lambda: fitted(None, lambda: Divided(of_nothing)))
    (found, *_), _ = said_of(lambda: fitted(WAYS[way], lambda: Divided(of_nothing)))
    assert all(bool(value.isnan().all()) for value in expected.values())
    assert all(bool(value.isnan().all()) for value in found.values())
