"""Hooks on what crosses a cut, or ends at one, are called as on one device: how often, and to what effect."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.errors import PipelineError
from tests.unit.split.nets import Block, Net, batch_of, seeded
from tests.unit.split.pipe import alone, assert_same, piped
from tests.whole import chosen

CUTS = (["layers.0"], ["layers.1"], ["layers.0", "layers.2"], ["layers.1", "head"], ["layers.2", "layers.3"])
Calls = list[tuple[str, Tensor]]


class Hooked(Net):
    """Hooks are put on by `hook`, after the copies are made."""

    def hook(self, calls: Calls) -> None:
        """For one copy of the module."""


def compare(kind, cuts=CUTS, **options) -> None:
    module = seeded(kind)
    expected: Calls = []
    one = alone(hooked(module, expected), batch_of(), **options)
    for cut in chosen(cuts, 1, 2) if cuts is CUTS else cuts:
        for split_backward in (False, True):
            calls: Calls = []
            found = piped(
                hooked(module, calls), batch_of(), stages=len(cut) + 1, how=cut,
                split_backward=split_backward, **options,
            )  # fmt: skip
            assert_same(found, one)
            assert sorted(name for name, _ in calls) == sorted(name for name, _ in expected)
            for name in {name for name, _ in expected}:
                for mine, theirs in zip(
                    [value for one, value in calls if one == name],
                    [value for one, value in expected if one == name],
                    strict=True,
                ):
                    torch.testing.assert_close(mine, theirs)


class _Hooks:
    """Every copy of a module that is hooked tells the same list."""

    def __init__(self, module: nn.Module, calls: Calls) -> None:
        self.module, self.calls = module, calls

    def __deepcopy__(self, memo):
        made = copy.deepcopy(self.module, memo)
        made.hook(self.calls)
        return made

    def __getattr__(self, name):
        return getattr(self.module, name)


def hooked(module: nn.Module, calls: Calls) -> _Hooks:
    return _Hooks(module, calls)


def first(gradients: tuple[Tensor | None, ...]) -> Tensor:
    return torch.zeros(()) if gradients[0] is None else gradients[0].clone()


class FullBackwardHooks(Hooked):
    def hook(self, calls):
        for number, layer in enumerate(self.layers):
            layer.register_full_backward_hook(
                lambda m, given, out, n=number: calls.append((f"in {n}", first(given)))
            )
            layer.register_full_backward_hook(
                lambda m, given, out, n=number: calls.append((f"out {n}", first(out)))
            )


class HalvesGradients(Hooked):
    def hook(self, calls):
        for layer in self.layers:
            layer.register_full_backward_hook(lambda m, given, out: (given[0] / 2,))


class PreHooks(Hooked):
    def hook(self, calls):
        for number, layer in enumerate(self.layers):

            def pre(m, out, n=number):
                calls.append((f"{n}", first(out)))
                return (out[0].clamp(-0.05, 0.05),)

            layer.register_full_backward_pre_hook(pre)


class FirstUnit(Hooked):
    """Its input needs no gradient."""

    def hook(self, calls):
        self.emb.register_full_backward_hook(lambda m, given, out: calls.append(("emb", first(out))))
        self.head.register_full_backward_hook(lambda m, given, out: calls.append(("head", first(given))))


class Skips(FullBackwardHooks):
    """Read on several stages: a hook gets the sum."""

    def body(self, h):
        a = self.layers[0](h)
        b = self.layers[1](a)
        c = self.layers[2](a * b)
        return self.layers[3](c) + a


class SkipsWithPreHooks(PreHooks):
    body = Skips.body


class Pair(Block):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = super().forward(x) if y is None else super().forward(x) + y
        return h, h.sin()


class Pairs(FullBackwardHooks):
    def __init__(self) -> None:
        super().__init__(Pair)

    def body(self, h):
        pair = (h, None)
        for layer in self.layers:
            pair = layer(*pair)
        return pair[0] * pair[1]


class InPlaceAfter(FullBackwardHooks):
    def body(self, h):
        for layer in self.layers:
            h = layer(h) * 1
            h += 1
        return h


class Checkpointed(HalvesGradients):
    def body(self, h):
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return h


class LooksOnly(FullBackwardHooks):
    """Forward hooks that change nothing beside."""

    def hook(self, calls):
        super().hook(calls)
        for layer in self.layers:
            layer.register_forward_hook(lambda m, args, out: None)


@pytest.mark.parametrize(
    "kind",
    [
        FullBackwardHooks, HalvesGradients, PreHooks, FirstUnit, Skips, SkipsWithPreHooks, Pairs,
        InPlaceAfter, Checkpointed, LooksOnly,
    ],
)  # fmt: skip
def test_hooks_of_units_are_called_as_on_one_device(kind):
    compare(kind)


class Changes(HalvesGradients):
    def hook(self, calls):
        super().hook(calls)
        for layer in self.layers:
            layer.register_forward_hook(lambda m, args, out: out * 2)


def test_a_forward_hook_that_changes_what_a_backward_hook_sees_is_refused():
    module = seeded(Changes)
    with pytest.raises(PipelineError, match="forward hook of unit 'layers.0' changes"):
        piped(hooked(module, []), batch_of(), stages=2)


class OnTheContainer(Hooked):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def body(self, h):
        return self.layers(h)

    def hook(self, calls):
        self.layers.register_full_backward_hook(lambda m, given, out: calls.append(("all", first(given))))


def test_a_backward_hook_of_a_module_of_several_stages_is_refused():
    module = seeded(OnTheContainer)
    with pytest.raises(PipelineError, match="backward hook of 'layers', which is spread over stages"):
        piped(hooked(module, []), batch_of(), stages=3)


class Retains(Hooked):
    """Keeps what crosses a cut, with its gradient."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        self.kept = []
        for layer in self.layers:
            h = layer(h)
            h.retain_grad()
            self.kept.append(h)
        return self.loss(h, batch)


class RetainsSkips(Retains):
    """Each of them is read on several stages."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        self.kept = []
        for layer in self.layers:
            h = layer(h)
            h.retain_grad()
            self.kept.append(h)
        return self.loss(h * self.kept[0] + self.kept[1] * self.kept[2], batch)


@pytest.mark.parametrize("kind", [Retains, RetainsSkips])
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_retained_gradients_are_those_of_one_device_on_every_rank(kind, split_backward, num_microbatches):
    module = seeded(kind)
    one = copy.deepcopy(module)
    loss = one.training_step(batch_of(), 0)
    loss.backward()
    found = piped(
        module, batch_of(), stages=3, how=["layers.1", "layers.3"], num_microbatches=num_microbatches,
        split_backward=split_backward,
    )  # fmt: skip
    for split in dict.fromkeys(found.splits):
        for mine, h in zip(split.root.kept, one.kept, strict=True):
            torch.testing.assert_close(mine, h.detach())
            torch.testing.assert_close(mine.grad, h.grad)


class Grows(nn.Module):
    """What it returns was written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x).mul_(0.5).add_(x)


class HookedThenWritten(Net):
    """A hook on what a layer returned, which is written in place then."""

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            before = h
            h = layer(h)
            h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            h.mul_(0.9)
            h = h + before
        return h


@pytest.mark.parametrize("cut", [["layers.1"], ["layers.0", "layers.2"]])
def test_a_hook_on_what_is_written_in_place_later_is_called_with_all_of_its_gradient(cut) -> None:
    module = seeded(lambda: HookedThenWritten(Grows))
    expected = alone(module, batch_of(8), num_microbatches=4)
    assert_same(piped(module, batch_of(8), len(cut) + 1, 4, how=cut), expected)


class HookedAtTheEnd(Net):
    """Hooks on what all layers returned, put on when the last one has."""

    def body(self, h: Tensor) -> Tensor:
        returned = []
        for layer in self.layers:
            h = layer(h)
            returned.append(h)
        for one in returned:
            one.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) * 1.5)
        return h


@pytest.mark.parametrize("cut", [["layers.1"], ["layers.0", "layers.2"]])
def test_a_hook_that_is_put_on_after_later_stages_layers_is_called(cut) -> None:
    module = seeded(HookedAtTheEnd)
    expected = alone(module, batch_of(8), num_microbatches=4)
    assert_same(piped(module, batch_of(8), len(cut) + 1, 4, how=cut), expected)


class WrittenThenHooked(Net):
    """What a layer returned is written in place and dropped, so that its identity may come again."""

    def body(self, h: Tensor) -> Tensor:
        first = h
        h = self.layers[0](h)
        h.mul_(0.9)
        h = h + first
        for layer in self.layers[1:]:
            h = layer(h)
            h.register_hook(lambda gradient: gradient * 1.5)
        return h


def test_a_hook_is_called_whatever_tensor_had_its_identity_before() -> None:
    module = seeded(lambda: WrittenThenHooked(Grows))
    expected = alone(module, batch_of(8), num_microbatches=8)
    assert_same(piped(module, batch_of(8), 2, 8, how=["layers.1"]), expected)


class HookedAfterWrite(Net):
    """A hook on what a layer returned, after it was written in place."""

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            h.mul_(0.9)
            h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return h


def test_a_hook_on_what_was_written_in_place_is_refused() -> None:
    with pytest.raises(PipelineError, match="is on a value computed between units"):
        piped(seeded(HookedAfterWrite), batch_of(), how=["layers.1"])
