"""Hooks and backwards that users write: by samples they are one device's, and otherwise warned of."""

import warnings

import pytest
import torch
from torch import nn

from tests.ranks.lightning_cases import Regression, assert_same, fit

STAGED = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B"}
kept: list[torch.Tensor] = []
HOOKS = {
    "half": lambda g: 0.5 * g,
    "clamp": lambda g: g.clamp(-0.02, 0.02),
    "norm of each sample": lambda g: 0.1 * g / (g.norm(dim=1, keepdim=True) + 0.1),
    "in place": lambda g: g.clone().mul_(0.5),
    "norm": lambda g: 0.1 * g / (g.norm() + 0.1),
    "norm as a number": lambda g: 0.1 * g / (g.norm().item() + 0.1),
    "without the mean": lambda g: g - g.mean(0),
    "kept": lambda g: kept.append(g),
}
SAID = ("a hook on ", "the backward of ")
OF_SAMPLES = ("half", "clamp", "norm of each sample", "in place")


class HookedOutput(Regression):
    """A hook on the gradient of a layer's output, and of what the step makes of the last one's.

    Args:
        hook: It.
    """

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def loss(self, batch):
        hidden = self.net[:3](batch[0])
        made = 2 * self.net[3:](hidden)
        if hidden.requires_grad:
            hidden.register_hook(self.hook)
            made.register_hook(self.hook)
        return nn.functional.mse_loss(made, batch[1])


def hooked(make, hook, num_microbatches):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = fit(STAGED | {"num_microbatches": num_microbatches}, lambda: make(hook))
    return found, sorted(str(one.message) for one in seen if str(one.message).startswith(SAID))


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", OF_SAMPLES)
@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_hook_that_goes_by_samples_is_that_of_one_device(name, num_microbatches):
    expected = fit(None, lambda: HookedOutput(HOOKS[name]))
    found, said = hooked(HookedOutput, HOOKS[name], num_microbatches)
    assert_same(found, expected)
    assert said == []


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", [name for name in HOOKS if name not in OF_SAMPLES])
@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_hook_that_mixes_or_keeps_samples_is_warned_of(name, num_microbatches):
    _, said = hooked(HookedOutput, HOOKS[name], num_microbatches)
    what = "gives nothing back" if name == "kept" else "mixes the samples"
    assert [line for line in said if what in line and "test_hooks_of_a_step.py" in line] == said
    assert len(set(said)) == 2


@pytest.mark.usefixtures("no_group_is_left")
def test_a_hook_on_the_whole_batch_is_not_warned_of():
    expected = fit(None, lambda: HookedOutput(HOOKS["norm"]))
    found, said = hooked(HookedOutput, HOOKS["norm"], 1)
    assert_same(found, expected)
    assert said == []


class HookedModules(Regression):
    """Full backward hooks on a layer that is a unit, on one inside of a unit, and on the module itself.

    Args:
        hook: Makes of a gradient what is handed on.
    """

    def __init__(self, hook):
        super().__init__()
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
        self.net = nn.Sequential(*self.net[:3], nn.Sequential(inner), *self.net[3:])
        for module in (self.net[1], inner[0], self.net[3]):
            module.register_full_backward_hook(lambda module, given, out: tuple(map(hook, given)))
        inner[1].register_full_backward_pre_hook(lambda module, out: tuple(map(hook, out)))


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", OF_SAMPLES)
@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_modules_hook_that_goes_by_samples_is_that_of_one_device(name, num_microbatches):
    expected = fit(None, lambda: HookedModules(HOOKS[name]))
    found, said = hooked(HookedModules, HOOKS[name], num_microbatches)
    assert_same(found, expected)
    assert said == []


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", ["norm", "norm as a number", "without the mean"])
def test_a_modules_hook_that_mixes_samples_is_warned_of_with_the_module(name):
    _, said = hooked(HookedModules, HOOKS[name], 2)
    assert sorted(one.split("of module ")[1].split(",")[0] for one in said) == [
        "'net.1'", "'net.3'", "'net.3.0.0'", "'net.3.0.1'"
    ]  # fmt: skip
    assert torch.nn.modules.module.BackwardHook is torch.utils.hooks.BackwardHook, "it is put back"


@pytest.mark.usefixtures("no_group_is_left")
def test_modules_hooks_of_a_batch_that_is_not_cut_are_not_compared():
    assert hooked(HookedModules, HOOKS["norm"], 1)[1] == []


class HookedAnew(HookedModules):
    """A hook is registered before each batch, and taken away after it."""

    def __init__(self, hook):
        super().__init__(lambda gradient: gradient)
        self.mixing = hook

    def on_train_batch_start(self, batch, batch_idx):
        hook = lambda _, given, __: (self.mixing(given[0]),)  # noqa: E731
        self.handle = self.net[1].register_full_backward_hook(hook)

    def on_train_batch_end(self, *args):
        self.handle.remove()


@pytest.mark.usefixtures("no_group_is_left")
def test_a_modules_hook_that_is_registered_for_each_batch_is_compared_once():
    _, said = hooked(HookedAnew, HOOKS["norm"], 2)
    assert len(said) == 1


class Handed(nn.Module):
    """Hands a value on by a function of autograd, which makes another one of its gradient, and a weight's.

    Args:
        hook: Makes it.
    """

    def __init__(self, hook):
        super().__init__()

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, scale):
                ctx.save_for_backward(x, scale)
                return x * scale

            @staticmethod
            def backward(ctx, gradient):
                x, scale = ctx.saved_tensors
                return hook(gradient * scale), (gradient * x).sum(0)

        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8).double())
        self.function = Function

    def forward(self, x):
        return self.function.apply(x, self.scale)


class HandedOn(Regression):
    """One in a layer, and one between layers."""

    def __init__(self, hook):
        super().__init__()
        self.net = nn.Sequential(*self.net[:3], nn.Sequential(Handed(hook)), *self.net[3:])
        self.between = [Handed(hook).function]

    def loss(self, batch):
        hidden = self.between[0].apply(self.net[:3](batch[0]), torch.ones(1).double())
        return nn.functional.mse_loss(self.net[3:](hidden), batch[1])


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", OF_SAMPLES)
@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_backward_that_goes_by_samples_is_that_of_one_device(name, num_microbatches):
    expected = fit(None, lambda: HandedOn(HOOKS[name]))
    found, said = hooked(HandedOn, HOOKS[name], num_microbatches)
    assert_same(found, expected)
    assert said == []


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", ["norm", "norm as a number", "without the mean"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_a_backward_that_mixes_samples_is_warned_of(name, num_microbatches):
    _, said = hooked(HandedOn, HOOKS[name], num_microbatches)
    assert [f"{__name__.rpartition('.')[2]}.py" in one for one in said] == [True] * (num_microbatches > 1)
    assert "trying_functions" not in torch.autograd.Function.apply.__qualname__, "it is put back"
