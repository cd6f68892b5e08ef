"""Seeds that a step sets are the user's: the numbers of one device that runs the same micro-batches."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.split.nets import WIDTH, Net, assert_refused, assert_works, batch_of, seeded
from tests.unit.split.pipe import assert_same, piped

CUTS = (["layers.1"], ["layers.0", "layers.2"], ["layers.0", "layers.2", "layers.3"])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.m(torch.tanh(x)), 0.4)


class DropNet(Net):
    def __init__(self) -> None:
        super().__init__(Dropping)


class SeededFeatures(Net):
    """Random features that are the same in each step."""

    def training_step(self, batch, batch_idx):
        torch.manual_seed(42)
        x = batch["x"] + torch.randn_like(batch["x"])
        h = self.body(self.emb(x))
        return self.loss(h + torch.randn(WIDTH, dtype=h.dtype), batch)


class SeededThroughout(DropNet):
    """Units draw between the draws of glue."""

    def training_step(self, batch, batch_idx):
        torch.manual_seed(42)
        h = self.emb(batch["x"] + torch.randn_like(batch["x"]))
        for layer in self.layers:
            h = layer(h) + torch.rand(WIDTH, dtype=h.dtype)
        return self.loss(F.dropout(h, 0.2), batch)


class SeededByBatch(SeededThroughout):
    def training_step(self, batch, batch_idx):
        torch.manual_seed(int(batch["x"].sum() * 1000))
        h = self.emb(batch["x"])
        for layer in self.layers:
            h = layer(h) + torch.rand(WIDTH, dtype=h.dtype)
        return self.loss(F.dropout(h, 0.2), batch)


class SeededInTheMiddle(DropNet):
    """Also on values that later stages do not have."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        torch.manual_seed(3)
        for layer in self.layers:
            dropped = F.dropout(h, 0.3) + torch.empty_like(h).normal_() + torch.bernoulli(torch.sigmoid(h))
            h = layer(dropped) * (1 + torch.rand(WIDTH, dtype=h.dtype))
        return self.loss(h, batch)


class OwnGenerator(Net):
    def training_step(self, batch, batch_idx):
        g = torch.Generator().manual_seed(42)
        h = self.emb(batch["x"] + torch.randn(batch["x"].shape, generator=g, dtype=torch.float64))
        for layer in self.layers:
            h = layer(h) + torch.rand(WIDTH, generator=g, dtype=h.dtype) * torch.empty_like(h).normal_(
                generator=g
            )
        return self.loss(h, batch)


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return self.m(x) * torch.rand(WIDTH, generator=generator, dtype=x.dtype)


class GeneratorGivenToUnits(Net):
    def __init__(self) -> None:
        super().__init__(Given)

    def training_step(self, batch, batch_idx):
        g = torch.Generator().manual_seed(42)
        h = self.emb(batch["x"])
        for layer in self.layers:
            h = layer(h, generator=g) + torch.rand(WIDTH, generator=g, dtype=h.dtype)
        return self.loss(h, batch)


class Forked(DropNet):
    """The units draw under the fork only."""

    def training_step(self, batch, batch_idx):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            h = self.emb(batch["x"] + torch.randn_like(batch["x"]))
            for layer in self.layers:
                h = layer(h)
            h = h + torch.randn_like(h)
        return self.loss(h, batch)


class SeedsItself(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return super().forward(x)


class UnitsThatSeed(Net):
    def __init__(self) -> None:
        super().__init__(SeedsItself)

    def body(self, h):
        for layer in self.layers:
            h = layer(h) + torch.rand(WIDTH, dtype=h.dtype)
        return h


class HostSeeds(Net):
    def training_step(self, batch, batch_idx):
        np.random.seed(3), random.seed(4)
        h = self.emb(batch["x"] * np.random.rand() + random.random())
        for layer in self.layers:
            h = layer(h) * np.random.rand() + random.random()
        return self.loss(h, batch)


class SeededAndCheckpointed(DropNet):
    def training_step(self, batch, batch_idx):
        torch.manual_seed(42)
        h = self.emb(batch["x"] + torch.randn_like(batch["x"]))
        for layer in self.layers:
            h = checkpoint(lambda x, layer=layer: F.dropout(layer(x), 0.2).sin(), h, use_reentrant=False)
        return self.loss(F.dropout(h, 0.2), batch)


class StepsDrawAgain(Net):
    """Code that keeps the random state and puts it back draws the same numbers."""

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        state = torch.get_rng_state()
        one = torch.randn_like(h)
        torch.set_rng_state(state)
        with torch.random.fork_rng(devices=[]):
            two = torch.randn_like(h)
        three = torch.randn_like(h)
        return self.loss(h + (one - two).abs() * 100 + (one - three).abs() * 100, batch)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(
    "kind",
    [
        SeededFeatures, SeededThroughout, SeededByBatch, SeededInTheMiddle, OwnGenerator,
        GeneratorGivenToUnits, Forked, UnitsThatSeed, HostSeeds,
        SeededAndCheckpointed, StepsDrawAgain,
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_one_device(kind, num_microbatches):
    assert_works(kind, batch_of(), CUTS, num_microbatches=num_microbatches, steps=2)


@pytest.mark.parametrize("kind", [SeededFeatures, SeededThroughout])
@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[0, 3], [1, 2]]])
def test_also_with_several_stages_a_rank_and_a_split_backward(kind, ranks):
    options = {"ranks": ranks, "stages": 4, "num_microbatches": 4}
    module = seeded(kind)
    one = piped(module, batch_of(), stages=1, num_microbatches=4)
    assert_same(piped(module, batch_of(), split_backward=True, **options), one)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.rand_like(x) + torch.randn(x.shape[-1], dtype=x.dtype)


class Scripted(Net):
    def body(self, h):
        for layer in self.layers:
            h = scripted(scripted(layer(h)))
        return h


class ScriptedAmongOthers(Net):
    """Read by several stages, drawn again and after other draws."""

    def body(self, h):
        noisy = scripted(F.dropout(h, 0.1))
        for layer in self.layers:
            h = layer(scripted(h)) + scripted(noisy) + torch.rand_like(h)
        return h


@pytest.mark.parametrize("kind", [Scripted, ScriptedAmongOthers])
def test_scripted_functions_draw_the_same_on_all_stages(kind):
    module = seeded(kind)
    expected = piped(module, batch_of(), stages=1, steps=2)
    assert len({float(loss) for loss in expected.losses}) == 4
    for stages in (2, 3):
        assert_same(piped(module, batch_of(), stages=stages, steps=2), expected)


class DrawsByValue(DropNet):
    def training_step(self, batch, batch_idx):
        torch.manual_seed(3)
        h = self.emb(batch["x"])
        for layer in self.layers:
            h = layer(torch.poisson(h.abs())) + torch.rand(WIDTH, dtype=h.dtype)
        return self.loss(h, batch)


def test_draws_whose_number_depends_on_a_value_elsewhere_are_refused():
    assert_refused(DrawsByValue, "how many numbers it draws depends on the value", cuts=CUTS[1:])


class Siamese(DropNet):
    """Units are called twice."""

    def training_step(self, batch, batch_idx):
        torch.manual_seed(42)
        one = self.body(self.emb(batch["x"]))
        two = self.body(self.emb(batch["x"] + torch.randn_like(batch["x"])))
        return self.loss(one, batch) + F.mse_loss(one, two)


def test_draws_after_a_unit_of_a_later_stage_are_refused_where_the_step_seeds():
    assert_refused(Siamese, "after a unit of a later stage that may draw from it too")
