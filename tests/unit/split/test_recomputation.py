"""Activation checkpointing: the recomputation draws what the forward drew, and gives back what it saved."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from lightning_pipeline.errors import PartitionError
from tests.unit.split.nets import (
    WIDTH,
    Anew,
    Net,
    assert_refused,
    assert_works,
    batch_of,
    same_or_refused,
    seeded,
)
from tests.unit.split.pipe import alone, assert_same, piped
from tests.whole import chosen

Region = Callable[..., Any]


class Dropping(nn.Module):
    """A layer with dropout; `inner` runs its inside."""

    inner: Region = staticmethod(lambda function, x: function(x))

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)

    def inside(self, x: Tensor) -> Tensor:
        return self.out(self.drop(torch.tanh(self.m(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inner(self.inside, x))


class CheckpointsItself(Dropping):
    """As layers of older transformers do; `region` is set by the net."""

    region: Region = staticmethod(lambda function, x: function(x))

    def __call__(self, x: Tensor) -> Tensor:
        return self.region(super().__call__, x)


class Regions(Net):
    """Dropout in layers and between them; each test says where the checkpoint stands."""

    def __init__(self, region: Region, block: Callable[[], nn.Module] = Dropping) -> None:
        super().__init__(block)
        self.region = region


class AroundUnits(Regions):
    def body(self, h):
        for layer in self.layers:
            h = self.region(layer, h) + F.dropout(h, 0.2)
        return h


class OverUnits(Regions):
    """Regions of two layers, with draws and other glue among them."""

    def pair(self, first, second, h):
        h = F.dropout(first(h), 0.3).tanh()
        return F.dropout(second(h).sin(), 0.3) * torch.rand_like(h)

    def body(self, h):
        h = self.region(partial(self.pair, self.layers[0], self.layers[1]), h)
        return self.region(partial(self.pair, self.layers[2], self.layers[3]), h)


class AroundGlue(Regions):
    """Also with a value in it that one of the stages does not have."""

    def mixed(self, a, b):
        return F.dropout(a.sin() * 2, 0.3).cos(), F.dropout(b.cos(), 0.3).sin() * b.exp()

    def body(self, h):
        a = h
        for layer in self.layers:
            a, h = h, self.region(self.mixed, a, layer(h))[1]
        return h


class InItsCall(Regions):
    def __init__(self, region: Region) -> None:
        super().__init__(region, CheckpointsItself)
        for layer in self.layers:
            layer.region = region


class InsideUnits(Regions):
    def __init__(self, region: Region) -> None:
        super().__init__(region)
        for layer in self.layers:
            layer.inner = region

    def body(self, h):
        for layer in self.layers:
            h = layer(h) + F.dropout(h, 0.2)
        return h


class Nested(Regions):
    """A region in a region, which holds two layers."""

    def pair(self, first, second, h):
        return F.dropout(self.region(second, F.dropout(first(h), 0.3).tanh()), 0.2).sin()

    body = OverUnits.body


class CalledTwice(Regions):
    """Each layer twice, in regions of their own: two masks, and two outputs that must not be mixed up."""

    def body(self, h):
        for layer in self.layers:
            one = self.region(lambda x, layer=layer: layer(x).sin(), h)
            two = self.region(lambda x, layer=layer: layer(x).cos(), h.tanh())
            h = one * two
        return h


class WritesInPlace(Regions):
    """The region changes what a layer returns."""

    def body(self, h):
        for layer in self.layers:
            h = self.region(lambda x, layer=layer: layer(x).mul_(1.5).add_(F.dropout(x, 0.1)).sin(), h)
        return h


class Sequentially(Net):
    def __init__(self, region: Region) -> None:
        super().__init__(Dropping)
        self.layers = nn.Sequential(*self.layers)
        self.region = region

    def body(self, h):
        return checkpoint_sequential(self.layers, 2, h, **self.options())

    def options(self) -> dict[str, Any]:
        return {"use_reentrant": getattr(self.region, "keywords", {}).get("use_reentrant", False)}


class PlainSequentially(Sequentially):
    def body(self, h):
        return self.layers(h)


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def saving_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sin.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


REGIONS: dict[str, Region] = {
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, saving_products),
    ),
}
KINDS = [AroundUnits, OverUnits, AroundGlue, InItsCall, InsideUnits, Nested, CalledTwice, WritesInPlace]


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_without_checkpoints(kind, region, split_backward):
    torch.manual_seed(0)
    module, without = seeded(partial(kind, REGIONS[region])), seeded(partial(kind, plain))
    expected = piped(without, batch_of(), stages=1, steps=2)
    for stages in chosen((1, 2, 3), 0, 2):
        assert_same(
            piped(module, batch_of(), stages=stages, steps=2, split_backward=split_backward), expected
        )


@pytest.mark.parametrize("region", ["non-reentrant", "reentrant"])
def test_checkpoint_sequential_draws_alike(region):
    module, without = (
        seeded(partial(Sequentially, REGIONS[region])),
        seeded(partial(PlainSequentially, plain)),
    )
    expected = piped(without, batch_of(), stages=1)
    for stages in (1, 2):
        assert_same(piped(module, batch_of(), stages=stages), expected)


@pytest.mark.parametrize("region", REGIONS)
def test_micro_batches_in_flight_together_are_kept_apart(region):
    module, without = seeded(partial(OverUnits, REGIONS[region])), seeded(partial(OverUnits, plain))
    expected = piped(without, batch_of(), stages=1, num_microbatches=4, steps=2)
    for ranks in ([[0], [1], [2]], [[0, 2], [1]]):
        found = piped(module, batch_of(), stages=3, ranks=ranks, num_microbatches=4, steps=2)
        assert_same(found, expected)


class WithoutDraws(Regions):
    def __init__(self, region: Region) -> None:
        super().__init__(region)
        for layer in self.layers:
            layer.drop.p = 0.0

    def pair(self, first, second, h):
        h = first(h).tanh()
        return second(h).sin()

    body = OverUnits.body


@pytest.mark.parametrize("keeping", [True, False])
@pytest.mark.parametrize("region", REGIONS)
def test_glue_between_layers_of_a_region_gets_its_own_saved_tensors_back(region, keeping):
    region = partial(REGIONS[region], preserve_rng_state=keeping)
    cuts = (["layers.2"], ["layers.0", "layers.2"], ["layers.2", "head"])
    assert_works(partial(WithoutDraws, region), batch_of(6), cuts, num_microbatches=3, steps=2)


class Undropped(Dropping):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


class InOneFunction(Net):
    """Two layers in a function of the user's, and two that stand free."""

    def body(self, h):
        h = Anew.apply(h.tanh(), [self.layers[0], self.layers[1]], lambda layer, x: x + layer.inside(x))
        return self.layers[3](self.layers[2](h))


def test_units_that_a_function_of_autograd_calls_stay_where_its_output_is_used():
    kind = partial(InOneFunction, Undropped)
    assert same_or_refused(kind, "autograd function Anew calls units", cuts=(2, 3)) == [True, False]


class KeepsAll(Net):
    """Regions whose functions see the list that their results go into, or the variable."""

    def body(self, h: Tensor) -> Tensor:
        kept = [h]
        for layer in self.layers[:2]:
            kept.append(checkpoint(lambda v, layer=layer: layer(v) + kept[0], kept[-1], use_reentrant=False))
        whole = self.layers[2]
        result = kept[-1]
        result = checkpoint(lambda v: whole(v) if result is not None else v, result, use_reentrant=False)
        return self.layers[3](result)


def test_a_region_may_see_what_the_step_makes_later() -> None:
    assert_works(KeepsAll)


def keeping_outside() -> Net:
    """It fills a list that its method alone knows."""
    seen: list[Tensor] = []

    class KeepsOutside(Net):
        def body(self, h: Tensor) -> Tensor:
            h = self.layers[0](h)
            seen.append(h)
            return super().body(h)

    return KeepsOutside()


def test_a_list_that_others_read_is_not_touched() -> None:
    assert_refused(keeping_outside, "a list outside the module keeps a tensor", cuts=(["layers.1"],))


class WritesAWeightAfter(WithoutDraws):
    """What follows the layer in the region is computed again from another output of it."""

    def body(self, h):
        for number, layer in enumerate(self.layers):
            h = self.region(lambda v, layer=layer: layer(v).tanh().sin(), h)
            if number == 1:
                weight = self.layers[1].out.weight
                weight.data = weight.data * 0.9
        return h


@pytest.mark.parametrize("number", [1, 2])
def test_a_region_runs_again_with_a_weight_that_was_written_after_it(number):
    module = seeded(partial(WritesAWeightAfter, REGIONS["non-reentrant"]))
    one_stage = piped(module, batch_of(), 1, number)
    assert_same(piped(module, batch_of(), 2, number), one_stage)
    if number == 1:
        assert_same(one_stage, alone(module, batch_of(), 1))
    with pytest.raises(PartitionError, match="weights of a checkpointed segment are written after it"):
        piped(module, batch_of(), 2, number, how=["layers.2"])
