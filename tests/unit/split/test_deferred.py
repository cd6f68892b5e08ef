"""The split backward: gradients equal to the fused one to the last bit, one recompute, hooks seen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.model.replay.weight_gradients import Deferral, WeightQueue


class Twice(nn.Module):
    """One weight at two sites, and in a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Mixed(Twice):
    """One weight in a linear and in an operation that is not deferred."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.weight.pow(2).sum()


class Tied(nn.Module):
    """An embedding whose table is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.table(x)), self.table.weight)


class Chunked(nn.Module):
    """An operation with several outputs between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.first(x).chunk(3, -1)
        return self.second(a * b + c)


class Checkpointed(nn.Module):
    """Counts how often its segment runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)
        )
        self.runs = 0

    def _segment(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.layers(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._segment, x, use_reentrant=False)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.ConvTranspose2d(8, 4, 2),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8, bias=False)),
        lambda: torch.randn(4, 7, 32),
        3,
    ),
    "twice": (Twice, lambda: torch.randn(4, 7, 32), 2),
    "mixed": (Mixed, lambda: torch.randn(4, 7, 32), 2),
    "tied": (Tied, lambda: torch.randint(0, 50, (4, 9)), 1),
    "chunked": (Chunked, lambda: torch.randn(4, 5, 32), 4),
    "checkpointed": (Checkpointed, lambda: torch.randn(5, 32), 6),
    "convolutions": (convolutions, lambda: torch.randn(4, 3, 12, 12), 6),
    "transformer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0), lambda: torch.randn(4, 5, 32), 8),
}


def fused(module: nn.Module, x: Tensor, passes: int = 2) -> dict[str, Tensor | None]:
    module = copy.deepcopy(module)
    for _ in range(passes):
        y = module(x)
        y.backward(torch.ones_like(y))
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def split(
    module: nn.Module, x: Tensor, passes: int = 2
) -> tuple[dict[str, Tensor | None], WeightQueue, nn.Module]:
    module, deferral = copy.deepcopy(module), Deferral()
    for _ in range(passes):
        queue = WeightQueue()
        with deferral.into(queue):
            y = module(x)
            with queue.collecting([get_gradient_edge(y)]):
                y.backward(torch.ones_like(y))
        queue.drain()
    return {name: parameter.grad for name, parameter in module.named_parameters()}, queue, module


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_a_fused_backward_to_the_last_bit(name: str, autocast: bool) -> None:
    make, data, deferred = CASES[name]
    torch.manual_seed(3)
    module, x = make(), data()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        expected = fused(module, x)
        found, queue, _ = split(module, x)
    assert len(queue.parameters) == deferred
    for key, gradient in expected.items():
        assert gradient is not None
        assert torch.equal(found[key], gradient), key


def test_checkpointed_segments_run_once_more_in_all() -> None:
    _, _, module = split(Checkpointed(), torch.randn(5, 32), passes=1)
    assert module.runs == 2


def test_weight_gradients_come_only_with_w() -> None:
    layer, queue = nn.Linear(4, 4), WeightQueue()
    x = torch.randn(3, 4, requires_grad=True)
    with Deferral().into(queue):
        y = layer(x).sum()
        with queue.collecting([get_gradient_edge(y)]):
            y.backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    queue.drain()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_stay_in_the_fused_backward(register: str) -> None:
    calls: list[Any] = []
    layer = nn.Linear(4, 4)
    getattr(layer.weight, register)(lambda value: calls.append(value))
    with Deferral().into(WeightQueue()):
        layer(torch.randn(3, 4)).sum().backward()
    assert len(calls) == 1
    assert layer.weight.grad is not None


def test_a_hook_that_a_weight_gets_after_the_forward_is_called_with_the_whole_gradient() -> None:
    calls: list[Tensor] = []
    layer, queue = nn.Linear(4, 4), WeightQueue()
    with Deferral().into(queue):
        y = layer(layer(torch.randn(3, 4))).sum()
        layer.weight.register_hook(calls.append)
        with queue.collecting([get_gradient_edge(y)]):
            y.backward()
    queue.drain()
    assert len(calls) == 1
    assert torch.equal(calls[0], layer.weight.grad)


def test_frozen_weights_pass_the_gradient_on() -> None:
    layer, queue = nn.Linear(4, 4).requires_grad_(False), WeightQueue()
    x = torch.randn(3, 4, requires_grad=True)
    with Deferral().into(queue):
        layer(x).sum().backward()
    queue.drain()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 4))


def test_functions_are_put_back() -> None:
    before = (F.linear, F.conv2d, F.embedding, torch.addmm)
    with pytest.raises(ValueError, match="stop"), Deferral().into(WeightQueue()):
        raise ValueError("stop")
    assert (F.linear, F.conv2d, F.embedding, torch.addmm) == before
