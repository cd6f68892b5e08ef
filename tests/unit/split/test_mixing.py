"""Samples of a batch that a step mixes with each other, before and after its units."""

import random

import numpy
import pytest
import torch
from torch import nn

from lightning_pipeline.model.mixing import exchanges, with_another
from lightning_pipeline.model.trace import trace_step
from lightning_pipeline.model.trace.units import find_units
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer
from tests.unit.split.nets import seeded
from tests.unit.split.pipe import Module

pytestmark = pytest.mark.usefixtures("no_group_is_left")

SAMPLES = 4


order = torch.tensor([2, 0, 3, 1])


class Mixes(Module):
    """Applies a function to its input first."""

    def __init__(self, function):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()
        self.function = function

    def training_step(self, batch, batch_idx):
        h = self.function(batch["x"] * 2)
        for layer in self.layers:
            h = layer(h)
        return (h - batch["x"]).pow(2).mean()


def mixed(function, x=None):
    module = seeded(lambda: Mixes(function))
    x = torch.randn(SAMPLES, 4, dtype=torch.float64) if x is None else x
    return trace_step(module, "training_step", ({"x": x}, 0), {}, units=find_units(module)).mixed


MIXING = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "permutation": lambda x: 0.7 * x + 0.3 * x[order],
    "index_select": lambda x: x.index_select(0, order),
    "sort": lambda x: x.sort(0).values,
    "cumsum": lambda x: x.cumsum(0),
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "spread": lambda x: x / (x.var(0).sqrt() + 1),
    "covariance": lambda x: (
        x @ (x[:, :3].T @ x[:, :3] / SAMPLES + torch.eye(3)).inverse().repeat(2, 2)[:4, :4]
    ),
    "pairs": lambda x: (x[:, :3] @ x[:, :3].T).softmax(1) @ x,
    "gather": lambda x: x.gather(0, order[:, None].expand(SAMPLES, 4)),
}
APART = {
    "flip of features": lambda x: x.flip(1),
    "roll of features": lambda x: x.roll(1, 1),
    "features by index": lambda x: x[:, order],
    "one of each": lambda x: x * x[torch.arange(SAMPLES), order][:, None],
    "in order": lambda x: x[torch.arange(SAMPLES)],
    "sort of features": lambda x: x.sort(1).values,
    "weights by index": lambda x: x + torch.randn(9, 4, dtype=torch.float64)[order],
    "weights": lambda x: x @ torch.eye(4, dtype=torch.float64),
    "products of each": lambda x: x * torch.einsum("nd,nd->n", x[:, :3], x[:, 1:])[:, None],
    "mean of features": lambda x: x - x.mean(1, keepdim=True),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_seen_with_its_line(name):
    ((line, _),) = mixed(MIXING[name]).items()
    assert "test_mixing.py" in line


@pytest.mark.parametrize("name", APART)
def test_what_keeps_samples_apart_is_not(name):
    assert mixed(APART[name]) == {}


def test_means_of_images_of_bytes_are_seen():
    images = torch.arange(SAMPLES * 4, dtype=torch.uint8).reshape(SAMPLES, 4)
    assert len(mixed(lambda x: x.double() - x.double().mean(0), images)) == 1
    assert mixed(lambda x: x.double() + x.sum(), images) == {}  # a count of tokens, say


def flipped(self, x, y):
    return nn.functional.mse_loss(self.net(0.6 * x + 0.4 * x.flip(0)), 0.6 * y + 0.4 * y.flip(0))


def sorted_by_a_feature(self, x, y):
    order = x[:, 0].argsort()
    return nn.functional.mse_loss(self.net(x[order]), y[order])


def whitened(self, x, y):
    x, counted = (x - x.mean(0)) / (x.std(0) + 0.1), (y > 0).sum()
    loss = ((self.net(x) - y).pow(2) * (y > 0)).sum() / counted
    self.log_dict({"counted": counted.double(), "loss": loss})
    return loss


def told_between(self, x, y):
    """Its logs and metrics are none of its own functions."""
    self.log("before", x.std())
    x = 0.6 * x + 0.4 * x.flip(0)
    self.log("mixed", x.pow(2).mean(), on_step=True, on_epoch=True)
    out = self.net(x)
    self.log("now", self.error(out, y))
    self.error.update(out, y)
    self.log("error", self.error)
    return nn.functional.mse_loss(out, y.flip(0))


def weighted_after(self, x, y):
    """What is divided by in the loss is the batch's, too."""
    rows, share, total = (self.net(x.roll(1, 0)) - y).pow(2).mean(1), y[:, 0].abs(), torch.zeros(())
    total = total + share.sum()
    loss = (rows * share / share.sum()).sum() + (rows * (share / share.sum())).sum()
    return loss + (rows * share.roll(1)).sum() / total + (rows * (y[:, 1] > 0)).sum() / (y[:, 1] > 0).sum()


def advantages(self, x, y):
    """What the loss alone has is the batch's, as of policy gradients with normalised advantages."""
    gain, counted = y[:, 0], (y[:, 1] > 0).sum()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    ratio = (self.net(x).log_softmax(-1)[:, 0] + 1).exp()
    self.log("gain", gain.pow(2).mean())
    least = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -least.mean() + (ratio.square() * (y[:, 1] > 0)).sum() / counted


def advantages_of_a_distribution(self, x, y):
    """PPO's: what is drawn from is checked, which reads values of the model; what is only logged mixes, too."""
    advantage = (y[:, 0] - y[:, 0].mean()) / (y[:, 0].std() + 1e-8)
    likely = torch.distributions.Categorical(logits=self.net(x)).log_prob(y.argmax(1))
    self.log("explained", 1 - (y[:, 1] - likely.detach()).var() / y[:, 1].var())
    return -(likely.exp() * advantage).mean()


def targets_on_the_device_of_a_value(self, x, y):
    """A placeholder tells its device without a call that is seen, a tensor by one."""
    h = self.net[:3](x)
    return nn.functional.mse_loss(self.net[3:](h), y.to(device=h.device) - y.mean(0))


def standardized_targets(self, x, y):
    out = self.net(x)
    return nn.functional.smooth_l1_loss(out, (y - y.mean(0)) / y.std(0)) + (out * (y / y.amax(0))).mean()


def decorrelated(self, x, y):
    x = x @ torch.linalg.inv(x.T @ x / len(x) + torch.eye(6, dtype=torch.float64))
    return nn.functional.mse_loss(self.net(x), y)


def two_views(self, x, y):
    return nn.functional.mse_loss(self.net(torch.cat([x, x.roll(1, 0)])), torch.cat([y, y.roll(1, 0)]))


def mixup(self, x, y):
    share, order = numpy.random.beta(1, 1), torch.randperm(len(x))
    out = self.net(share * x + (1 - share) * x[order])
    loss, other = nn.functional.mse_loss(out, y), nn.functional.mse_loss(out, y[order])
    return share * loss + (1 - share) * other


def mixup_by_torch(self, x, y):
    share, order = torch.distributions.Beta(1.0, 1.0).sample().item(), torch.randperm(len(x))
    y, out = share * y + (1 - share) * y[order], self.net(share * x + (1 - share) * x[order])
    return nn.functional.mse_loss(out, y)


def weighted_by_chance(self, x, y):
    """What is drawn after units, and divided by, is the batch's."""
    order = torch.randperm(len(x))
    rows = (self.net(0.6 * x + 0.4 * x[order]) - y).pow(2).mean(1)
    power, weights = torch.rand(()).double() + 0.5, y[:, 0].abs()
    return (weights**power * rows).sum() / (weights**power).sum()


def cutmix(self, x, y):
    share, order, begin = random.random(), torch.randperm(len(x)), numpy.random.randint(3)
    x[:, begin : begin + 3] = x[order, begin : begin + 3]
    out = self.net(x)
    loss, other = nn.functional.mse_loss(out, y), nn.functional.mse_loss(out, y[order])
    return share * loss + (1 - share) * other


def from_the_first(self, x, y):
    return nn.functional.mse_loss(self.net(x - x[0] + x[-1:]), y)


def by_numbers(self, x, y):
    x = x - x.mean().item() + float(x.numpy().max())
    return nn.functional.mse_loss(self.net(x - torch.tensor(x.std(0).tolist(), dtype=x.dtype)), y)


def by_numbers_between(self, x, y):
    """Read from the batch, they move and scale what units give."""
    h = self.net[:3](x / 2 - x[0].mean().item())
    h = self.net[3:]((h - x.mean().item()) / x.std().item() + x[-1].mean() + len(y[:, 0].round().unique()))
    return nn.functional.mse_loss(h, y)


def by_numbers_in_the_loss(self, x, y):
    """They bound what units give, and targets are made of them."""
    out, most = self.net(x), int(y[:, 0].abs().max()) + 1
    loss = nn.functional.smooth_l1_loss(out, y / float(y.max()), beta=float(y.std()))
    return (
        loss + (out - y).pow(2).mean(1).clamp(max=x.mean().item() + 1).mean() + (out + 1 / most).exp().mean()
    )


def by_a_condition(self, x, y):
    """Each micro-batch would decide otherwise than the batch, and all of them alike."""
    out, mask = self.net(x), y[:, 0] > -1.5
    loss, counted = nn.functional.mse_loss(out, y), int(mask.sum())
    if counted > 3:
        loss = loss + ((out - y).abs().mean(1) * mask).sum() / counted
    if (y[:, 1] > 1).any():
        loss = loss + 0.3 * out[y[:, 1] > 1].pow(2).mean()
    return loss


def standardized_outside(self, x, y):
    """Brackets are set otherwise than in `standardized_targets`."""
    return nn.functional.smooth_l1_loss((self.net(x) - y.mean(0)) / y.std(0), y)


def by_classes(self, x, y):
    """Weights by counts of the batch, published for rare classes."""
    out, labels = self.net(x), y.argmax(1)
    share = nn.functional.one_hot(labels, 3).double().mean(0) + 0.1
    weights = 1 / (1 + labels.bincount(minlength=3))
    loss = nn.functional.cross_entropy(out + share.log(), labels, weights.double())
    positive = (y > 0).double()
    weight = (1 - positive).sum(0) / (positive.sum(0) + 1)
    loss = loss + nn.functional.binary_cross_entropy_with_logits(out, positive, pos_weight=weight)
    return loss + (nn.functional.cross_entropy(out, labels, reduction="none").exp() * weights[labels]).mean()


def by_pairs_of_targets(self, x, y):
    rows = (self.net(x) - y).pow(2).mean(1)
    far, apart = torch.cdist(y, y).mean(1), (y[:, None] - y).abs().sum((1, 2))
    return (
        (rows * far).mean()
        + (rows + apart).sqrt().mean()
        + (rows + torch.einsum("nd,nd->", y, y)).sqrt().mean()
    )


def by_place(self, x, y):
    h = self.net[:3](x) * (torch.arange(len(x)) < 3)[:, None]
    first = torch.zeros(len(x), dtype=x.dtype)
    first[0] = 1
    return ((self.net[3:](h + first[:, None]) - y).pow(2).mean(1) * torch.linspace(0, 1, len(x))).mean()


def first_between(self, x, y):
    """After units, one that has no rows."""
    return nn.functional.mse_loss(self.net(x) + self.net(x[0]), y)


def by_a_distribution(self, x, y):
    """Its checks read numbers of what units compute."""
    x, y = 0.6 * x + 0.4 * x.flip(0), 0.6 * y + 0.4 * y.flip(0)
    return -torch.distributions.Normal(self.net(x), torch.ones_like(y)).log_prob(y).mean()


def after_an_epoch(self, x, y):
    if self.current_epoch == 1:
        x, y = x - x.mean().item(), 0.6 * y + 0.4 * y.flip(0)
    return nn.functional.mse_loss(self.net(x), y)


def one_by_one(self, x, y):
    """Does not mix."""
    self.log("mean", x.mean().item())
    return nn.functional.mse_loss(self.net(torch.stack([one.flip(0) * one.mean() for one in x])), y)


def over_time(x):
    """Five steps for each sample, and how many of them it has."""
    steps = torch.linspace(0.5, 1.5, 5, dtype=x.dtype)
    return x[:, None] * steps[:, None], 1 + (3 * x[:, 0].abs()).long().clamp(max=4)


def cut_to_the_longest(self, x, y):
    x, lengths = over_time(x)
    out = self.net(x[:, : int(lengths.max())])
    return nn.functional.mse_loss(out, y[:, None].expand_as(out))


def cut_by_a_tensor(self, x, y):
    x, lengths = over_time(x)
    out = self.net(x[:, : lengths.max()])
    return nn.functional.mse_loss(out, y[:, None].expand_as(out))


def cut_between(self, x, y):
    x, lengths = over_time(x)
    h = self.net[:3](x)
    out = self.net[3:](h[:, : lengths.max().item()])
    return nn.functional.mse_loss(out, y[:, None].expand_as(out))


def cut_and_masked(self, x, y):
    x, lengths = over_time(x)
    width = int(lengths.max())
    out = self.net(x[:, :width])
    mask = (torch.arange(width) < lengths[:, None])[..., None]
    return ((out - y[:, None]) ** 2 * mask).sum() / mask.sum()


class Mixed(Regression):
    """Mixes in the step."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("shift", torch.zeros(6, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return self.function(self, *batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.function(self, *batch))


STAGED = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B"}
BY_LOSS = (
    advantages, advantages_of_a_distribution, standardized_targets, targets_on_the_device_of_a_value,
)  # fmt: skip


BY_ORDER = (
    flipped, sorted_by_a_feature, whitened, told_between, weighted_after, decorrelated, two_views, *BY_LOSS,
)  # fmt: skip
UNSEEN = (
    from_the_first, by_numbers, by_numbers_between, by_numbers_in_the_loss, by_a_condition, standardized_outside,
    by_classes, by_pairs_of_targets, by_place, first_between, by_a_distribution, cut_to_the_longest,
    cut_by_a_tensor, cut_between, cut_and_masked,
)  # fmt: skip
"""By a trace, or not all of it."""
BY_CHANCE = (mixup, mixup_by_torch, cutmix, weighted_by_chance)


def fitted(function, pipeline):
    """22 samples in batches of 8, so that micro-batches have 3, 3 and 2 samples, and then 2 each."""
    return fit(
        pipeline, lambda: Mixed(function), max_epochs=1, num_sanity_val_steps=0, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def told(recwarn):
    return [str(one.message) for one in recwarn if "mixes samples of the batch" in str(one.message)]


@pytest.mark.parametrize("schedule", [STAGED, {"stages": 1, "schedule": "ZBH1"}], ids=["two stages", "ZBH1"])
@pytest.mark.parametrize("function", BY_ORDER)
def test_micro_batches_have_their_samples_of_what_one_device_mixes(function, schedule, recwarn):
    found = fitted(function, {**schedule, "num_microbatches": 3})
    assert_same(found, fitted(function, None))
    assert not told(recwarn)


@pytest.mark.parametrize("function", UNSEEN)
@pytest.mark.parametrize("number", [3, 8])
def test_what_no_operation_shows_to_mix_samples_is_one_devices(function, number, recwarn):
    assert_same(fitted(function, {**STAGED, "num_microbatches": number}), fitted(function, None))
    assert not told(recwarn)


class LogsShares(Regression):
    """A count over the number of samples, both of which a micro-batch has of its own."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net((x - x.mean(0)) / (x.std(0) + 0.1))
        self.log("share", (y[:, 0] > -0.3).sum().item() / len(y))
        return nn.functional.mse_loss(out, y)


def test_a_share_that_a_mended_step_logs_is_that_of_one_device():
    def logged(pipeline):
        run = trainer(pipeline, enable_progress_bar=False)
        run.fit(LogsShares(), loader(8))
        return float(run.callback_metrics["share"])

    assert logged({**STAGED, "num_microbatches": 2}) == pytest.approx(logged(None))


class Predicts(Regression):
    """Gives what a unit returned in numbers of the batch."""

    def predict_step(self, batch, batch_idx):
        x, y = batch
        return self.net(x) * y.std() + y.std(0)


def test_predictions_in_numbers_of_the_batch_are_one_devices():
    def predicted(pipeline):
        return torch.cat(trainer(pipeline, enable_progress_bar=False).predict(Predicts(), loader(8)))

    torch.testing.assert_close(
        predicted({**STAGED, "num_microbatches": 3}), predicted(None), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("function", [after_an_epoch, one_by_one])
def test_a_step_that_mixes_later_is_looked_at_again(function, recwarn):
    def run(pipeline):
        return fit(
            pipeline, lambda: Mixed(function), max_epochs=2, limit_val_batches=0, enable_progress_bar=False
        )

    assert_same(run({**STAGED, "num_microbatches": 3}), run(None))
    assert not told(recwarn)


def sometimes(self, x, y):
    if random.random() < 0.3:
        x = 0.6 * x + 0.4 * x.flip(0)
    return nn.functional.mse_loss(self.net(x), y)


def test_samples_that_are_mixed_by_chance_are_those_of_a_batch_that_is_not_cut(recwarn):
    def run(number):
        return fit(
            {**STAGED, "num_microbatches": number}, lambda: Mixed(sometimes), max_epochs=3,
            limit_val_batches=0, enable_progress_bar=False,
        )  # fmt: skip

    assert_same(run(3), run(1))
    assert not told(recwarn)


@pytest.mark.parametrize("function", BY_CHANCE)
def test_what_is_drawn_to_mix_samples_is_drawn_once_a_batch(function, recwarn):
    found = fitted(function, {**STAGED, "num_microbatches": 3})
    assert_same(found, fitted(function, {**STAGED, "num_microbatches": 1}))
    assert not told(recwarn)


def by_pairs(self, x, y):
    return nn.functional.mse_loss(self.net((x @ x.T).softmax(1) @ x.flip(0)), y)


def by_numpy(self, x, y):
    return nn.functional.mse_loss(self.net(x[numpy.random.permutation(len(x))]), y)


def in_halves(self, x, y):
    one, other = x.tensor_split(2)
    return nn.functional.mse_loss(self.net(one + other[: len(one)].mean(1, keepdim=True)), y[: len(one)])


def by_how_many(self, x, y):
    """A number of Python of each micro-batch."""
    return nn.functional.mse_loss(self.net(x) / len(x), y)


def by_numpy_in_the_loss(self, x, y):
    y = y.numpy()
    return nn.functional.mse_loss(self.net(x), torch.from_numpy((y - y.mean(0)) / y.std(0)))


def rolled_by_values(self, x, y):
    out = self.net(x)
    return nn.functional.mse_loss(out, y.roll(1 if out.sum().item() > 0 else 2, 0))


@pytest.mark.parametrize(
    "function",
    [
        by_pairs,
        by_numpy,
        in_halves,
    ],
)
def test_a_step_whose_samples_of_the_batch_are_not_found_is_warned_of(function, recwarn):
    fitted(function, {**STAGED, "num_microbatches": 3})
    assert sorted(text.partition(" ")[0] for text in told(recwarn)) == ["training_step", "validation_step"]
    assert all("test_mixing.py" in text for text in told(recwarn))


def validated(function, pipeline):
    module, run = Mixed(function), trainer(pipeline)
    return run.validate(module, loader(seed=4), verbose=False)[0]["val_loss"]


@pytest.mark.parametrize(
    ("function", "at"),
    [(rolled_by_values, "roll"), (by_how_many, "div"), (by_numpy_in_the_loss, "mse_loss")],
    ids=["roll", "number", "NumPy"],
)
def test_what_micro_batches_have_of_their_own_is_warned_of_in_training_and_logged_as_one(
    function, at, recwarn
):
    pipeline = {**STAGED, "num_microbatches": 3}
    fitted(function, pipeline)
    (text,) = told(recwarn)
    assert text.startswith("training_step") and f"{at} at test_mixing.py" in text
    assert validated(function, pipeline) == pytest.approx(validated(function, None), rel=1e-10)


def shared_by_a_mean(self, x, y):
    """What is divided by is followed, so that nothing is to be said where it cannot be given."""
    self.steps = getattr(self, "steps", 0) + 1
    mask = (y[:, 0] > 0).double()
    return ((self.net(x) - y).pow(2).mean(1) * (mask / mask.mean())).mean()


def test_a_mean_that_the_loss_follows_is_not_warned_of(recwarn):
    found = fitted(shared_by_a_mean, {**STAGED, "num_microbatches": 3})
    assert_same(found, fitted(shared_by_a_mean, None))
    assert not told(recwarn)


class SortsLast(Mixed):
    """Flips its samples; the last batch, of 6, is sorted instead, and put back."""

    def __init__(self):
        super().__init__(self.mix)
        self.is_last = False

    def on_train_batch_start(self, batch, batch_idx):
        self.is_last = batch_idx == 2

    @staticmethod
    def mix(self, x, y):
        return sorted_and_back(self, x, y) if self.is_last else flipped(self, x, y)


class Parts(Mixed):
    """Has two units that the step calls by itself."""

    def __init__(self, function):
        super().__init__(function)
        torch.manual_seed(2)
        self.first = nn.Linear(6, 6).double()


def sorted_and_back(self, x, y):
    order = x[:, 0].argsort()
    return nn.functional.mse_loss(self.net(x[order])[order.argsort()], y)


def mixup_between(self, x, y):
    h, order = self.first(x), torch.randperm(len(x))
    return nn.functional.mse_loss(self.net(0.7 * h + 0.3 * h[order]), 0.7 * y + 0.3 * y[order])


def best_by_values(self, x, y):
    best = x[:, 0].topk(2).indices
    out = self.net(0.6 * x + 0.4 * x.flip(0))
    return nn.functional.mse_loss(out, y) + out[best].mean()


def chosen_by_a_list(self, x, y):
    order = x[:, 0].argsort().tolist()
    return nn.functional.mse_loss(self.net(0.6 * x + 0.4 * x.flip(0))[order], y[order])


def gathered_by_position(self, x, y):
    order = torch.randperm(len(x))[:, None].expand(-1, 3)
    return nn.functional.mse_loss(self.net(x.flip(0)).take_along_dim(order, 0), y)


def by_a_buffer_given(self, x, y):
    buffer = torch.empty_like(x)
    torch.add(0.6 * x, x.flip(0), alpha=0.4, out=buffer)
    return nn.functional.mse_loss(self.net(buffer), y)


@pytest.mark.parametrize(
    "function",
    [mixup_between, best_by_values, chosen_by_a_list, gathered_by_position, by_a_buffer_given],
)
def test_numbers_of_the_batchs_rows_choose_none_of_a_micro_batchs(function, recwarn):
    fit(
        {**STAGED, "num_microbatches": 3}, lambda: Parts(function), max_epochs=1, num_sanity_val_steps=0,
        limit_train_batches=1, limit_val_batches=0, enable_progress_bar=False,
    )  # fmt: skip
    assert len(told(recwarn)) == 1


def test_batches_of_other_sizes_than_one_that_cannot_be_given_are():
    def run(pipeline):
        return fit(pipeline, SortsLast, max_epochs=2, limit_val_batches=0, enable_progress_bar=False)

    assert_same(run({**STAGED, "num_microbatches": 3}), run(None))


def test_samples_that_are_sorted_and_put_back_are_one_devices():
    found = fitted(sorted_and_back, {**STAGED, "num_microbatches": 3})
    assert_same(found, fitted(sorted_and_back, None))


def chosen_classes(self, x, y):
    """Cross entropy by hand, of mixed samples."""
    out, labels = self.net(0.6 * x + 0.4 * x.flip(0)).log_softmax(1), y.argmax(1)
    loss = -out[torch.arange(len(y)), labels].mean()
    return loss - 0.4 * out[torch.arange(len(y)), labels.flip(0)].mean()


def test_micro_batches_count_their_own_rows_after_units(recwarn):
    found = fitted(chosen_classes, {**STAGED, "num_microbatches": 3})
    assert_same(found, fitted(chosen_classes, None))
    assert not told(recwarn)


def drops_layers(self, x, y):
    """What is decided by chance after the first unit is decided for the batch."""
    share, order = numpy.random.beta(1, 1), torch.randperm(len(x))
    h = self.first(share * x + (1 - share) * x[order])
    if random.random() < 0.5:
        h = self.first(h)
    return nn.functional.mse_loss(self.net(h * random.random()), share * y + (1 - share) * y[order])


def test_what_python_draws_after_units_is_drawn_once_a_batch(recwarn):
    def run(number):
        return fit(
            {**STAGED, "num_microbatches": number}, lambda: Parts(drops_layers), max_epochs=3,
            num_sanity_val_steps=0, enable_progress_bar=False,
        )  # fmt: skip

    assert_same(run(3), run(1))
    assert not told(recwarn)


def test_parts_that_are_no_rows_in_order_are_warned_of(recwarn):
    class Strided(Mixed):
        def split_batch(self, batch, num_microbatches):
            return [[one[start::2] for one in batch] for start in range(2)]

    run = trainer({**STAGED, "num_microbatches": 2}, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    run.fit(Strided(flipped), loader(8))
    assert len(told(recwarn)) == 1


def test_tensors_without_rows_in_memory_stay_as_they_are_where_a_sample_is_exchanged():
    batch = {"sparse": torch.eye(4).to_sparse(), "x": torch.arange(4.0), "half": torch.ones(4).half()}
    for row, made in exchanges(4):
        other = with_another(batch, 4, made)
        assert other["sparse"] is batch["sparse"]
        assert (other["x"] != batch["x"]).nonzero().flatten().tolist() == [row]
