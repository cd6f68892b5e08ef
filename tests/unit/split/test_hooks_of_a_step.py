"""Hooks that a step puts on gradients of values: by samples they are one device's, and otherwise warned of."""

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


@pytest.fixture
def no_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def hooked(hook, num_microbatches):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = fit(STAGED | {"num_microbatches": num_microbatches}, lambda: HookedOutput(hook))
    return found, {str(one.message) for one in seen if "a hook on a gradient" in str(one.message)}


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", OF_SAMPLES)
@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_hook_that_goes_by_samples_is_that_of_one_device(name, num_microbatches):
    expected = fit(None, lambda: HookedOutput(HOOKS[name]))
    found, said = hooked(HOOKS[name], num_microbatches)
    assert_same(found, expected)
    assert said == set()


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", [name for name in HOOKS if name not in OF_SAMPLES])
@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_hook_that_mixes_or_keeps_samples_is_warned_of(name, num_microbatches):
    _, said = hooked(HOOKS[name], num_microbatches)
    what = "gives nothing back" if name == "kept" else "mixes the samples"
    assert {line for line in said if what in line and "test_hooks_of_a_step.py" in line} == said
    assert len(said) == 2


@pytest.mark.usefixtures("no_group_is_left")
def test_a_hook_on_the_whole_batch_is_not_warned_of():
    expected = fit(None, lambda: HookedOutput(HOOKS["norm"]))
    found, said = hooked(HOOKS["norm"], 1)
    assert_same(found, expected)
    assert said == set()


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


def hooked_modules(hook, num_microbatches):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = fit(STAGED | {"num_microbatches": num_microbatches}, lambda: HookedModules(hook))
    return found, [str(one.message) for one in seen if "a hook on gradients" in str(one.message)]


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", OF_SAMPLES)
@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_modules_hook_that_goes_by_samples_is_that_of_one_device(name, num_microbatches):
    expected = fit(None, lambda: HookedModules(HOOKS[name]))
    found, said = hooked_modules(HOOKS[name], num_microbatches)
    assert_same(found, expected)
    assert said == []


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("name", ["norm", "norm as a number", "without the mean"])
def test_a_modules_hook_that_mixes_samples_is_warned_of_with_the_module(name):
    _, said = hooked_modules(HOOKS[name], 2)
    assert sorted(one.split("of module ")[1].split(",")[0] for one in said) == [
        "'net.1'", "'net.3'", "'net.3.0.0'", "'net.3.0.1'"
    ]  # fmt: skip
    assert torch.nn.modules.module.BackwardHook is torch.utils.hooks.BackwardHook, "it is put back"


@pytest.mark.usefixtures("no_group_is_left")
def test_modules_hooks_of_a_batch_that_is_not_cut_are_not_compared():
    assert hooked_modules(HOOKS["norm"], 1)[1] == []
