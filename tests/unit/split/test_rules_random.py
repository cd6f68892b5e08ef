"""R7: random draws are the same run with any number of stages, and stages agree on them."""

import gc
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.model.random import StepSeeds
from tests.unit.split.nets import WIDTH, Net, batch_of, seeded
from tests.unit.split.pipe import assert_same, piped


def assert_any_number_of_stages(kind, batch=None, cuts=(2, 4), steps=2, **options) -> None:
    module = seeded(kind)
    batch = batch if batch is not None else batch_of()
    expected = piped(module, batch, stages=1, steps=steps, **options)
    assert all(p.losses for p in (expected,))
    assert expected.losses[0] != expected.losses[2], "each step draws anew"
    for stages in cuts:
        assert_same(piped(module, batch, stages=stages, steps=steps, **options), expected)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.m(x)))


class DropoutInUnits(Net):
    def __init__(self) -> None:
        super().__init__(Dropping)


class DropoutInGlue(DropoutInUnits):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def body(self, h):
        for layer in self.layers:
            h = self.drop(layer(h)) + F.dropout(h, 0.2)
        return h


class TwoReaders(Net):
    """A value dropped out in glue is read on two stages: one mask."""

    def body(self, h):
        dropped = F.dropout(h, 0.5)
        h = self.layers[1](self.layers[0](dropped))
        return self.layers[3](self.layers[2](h)) + F.dropout(dropped, 0.1)


class ManyDraws(DropoutInUnits):
    """Draws of all kinds before, between and after the units."""

    def training_step(self, batch, batch_idx):
        x = batch["x"] + 0.1 * torch.randn_like(batch["x"])
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) + torch.rand(WIDTH, dtype=x.dtype)
        order = torch.randperm(x.shape[0])
        h = self.emb(x[order])
        for layer in self.layers:
            h = layer(h) + torch.empty_like(h).normal_() * 0.1
            h = h * (1 + torch.randint(0, 3, (1,)))
        h = h + torch.normal(torch.zeros_like(h), 0.1)
        return self.loss(F.gumbel_softmax(h), {"y": batch["y"][order]})


class Mixup(Net):
    """numpy, Python and torch draw, before and after the model."""

    def training_step(self, batch, batch_idx):
        ratio = np.random.beta(0.4, 0.4)
        shift = random.randrange(1, 3)
        x = ratio * batch["x"] + (1 - ratio) * batch["x"].roll(shift, 0)
        h = self.body(self.emb(x))
        loss = ratio * self.loss(h, batch)
        return loss * (1 + np.random.rand()) * (1 + random.random()) * (1 + torch.rand(()))


class MixupBetween(Net):
    """numpy draws between units."""

    def body(self, h):
        for layer in self.layers:
            h = layer(h) * float(np.random.beta(0.5, 0.5)) + random.gauss(0, 1)
        return h


class HostRandomUnit(Net):
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.m(x) * float(np.random.rand()) + random.random()

    def __init__(self) -> None:
        super().__init__(HostRandomUnit.Noisy)

    def loss(self, h, batch):
        return super().loss(h * float(np.random.rand()) + random.random(), batch)


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def training_step(self, batch, batch_idx):
        x = batch["x"] + torch.randn(batch["x"].shape, generator=self.generator, dtype=torch.float64)
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h) + torch.rand(WIDTH, generator=self.generator, dtype=torch.float64)
        return self.loss(h, batch)

    def __deepcopy__(self, memo):
        made = OwnGenerator()
        made.load_state_dict(self.state_dict())
        return made


class GeneratorInUnit(Net):
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(WIDTH, WIDTH)
            self.rng = np.random.default_rng(3)
            self.python = random.Random(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.m(x) * self.rng.random() + self.python.random()

    def __init__(self) -> None:
        super().__init__(GeneratorInUnit.Noisy)
        for layer in self.layers:
            layer.rng = self.layers[0].rng

    def loss(self, h, batch):
        return super().loss(h * self.layers[0].rng.random(), batch)


class SiameseNoise(HostRandomUnit):
    def training_step(self, batch, batch_idx):
        one = self.body(self.emb(batch["x"]))
        two = self.body(self.emb(batch["x"] + float(np.random.rand())))
        return self.loss(one, batch) + F.mse_loss(one, two * random.random())


class NumpyGenerator(Net):
    """A numpy Generator of the module's own: not seen by any seed."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"] * self.rng.random())
        for layer in self.layers:
            h = layer(h) * self.rng.random()
        return self.loss(h, batch)


class Diffusion(Net):
    """Timesteps and noise before the model, the noise is the target."""

    def training_step(self, batch, batch_idx):
        noise = torch.randn_like(batch["x"])
        t = torch.randint(0, 10, (batch["x"].shape[0], 1))
        h = self.body(self.emb(batch["x"] * (1 - t / 10) + noise * t / 10))
        return F.mse_loss(self.head(h), noise[:, :2])


class RandomPermutationInAttention(Net):
    def body(self, h):
        for layer in self.layers:
            q = layer(h).unsqueeze(0)
            h = h + F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).squeeze(0)
        return h


@pytest.mark.parametrize(
    "kind",
    [
        DropoutInUnits, DropoutInGlue, TwoReaders, ManyDraws, Mixup, MixupBetween, HostRandomUnit,
        OwnGenerator,
        Diffusion, RandomPermutationInAttention,
    ],
)  # fmt: skip
def test_a_random_step_is_the_same_with_1_2_and_4_stages(kind):
    assert_any_number_of_stages(kind)


@pytest.mark.parametrize("kind", [NumpyGenerator, GeneratorInUnit, SiameseNoise])
def test_generators_of_the_module_draw_the_same_on_all_stages(kind):
    assert_any_number_of_stages(kind)


def test_micro_batches_and_steps_draw_different_numbers():
    outcome = piped(seeded(Mixup), {k: v[:1].repeat(4, 1) for k, v in batch_of().items()}, stages=2, steps=2)
    assert len({float(loss) for loss in outcome.losses}) == 4


def test_the_users_random_state_is_put_back():
    module = seeded(ManyDraws)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    piped(module, batch_of(), stages=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_a_batch_that_was_dropped_changes_no_random_state_later():
    seeds = StepSeeds([], (1,))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    del seeds
    gc.collect()
    assert torch.equal(torch.get_rng_state(), before)


class Choosing(Net):
    """Stochastic depth decided by a draw that all stages share."""

    def body(self, h):
        for layer in self.layers:
            h = h + layer(h) * float(random.random() < 0.5)
        return h


def test_a_host_draw_that_weighs_layers_is_the_same_on_all_stages():
    assert_any_number_of_stages(Choosing)
