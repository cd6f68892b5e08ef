"""Whether what a unit computes depends on gradients being recorded, as `torch.is_grad_enabled()` tells it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline._torch import TorchDispatchMode, disable_current_modes
from lightning_pipeline.model.tensors import (
    Generators,
    PlaceholderMode,
    map_tensors,
    random_state_kept,
    tensors_in,
)

Forward = Callable[..., Any]


class _Named(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(returned.alias_info is not None for returned in func._schema.returns):  # no views
            self.names.append(func)
        return func(*args, **(kwargs or {}))


def same_operations(forward: Forward, args: Any, kwargs: Any, mode: PlaceholderMode) -> bool:
    """Whether a forward does the same with and without gradients, as far as shapes tell."""
    before = mode.watcher, mode.idle
    mode.watcher = mode.idle = None
    found = []
    try:
        for enabled in (False, True):
            named = _Named()
            with torch.set_grad_enabled(enabled), mode, named:
                forward(*args, **kwargs)
            found.append(named.names)
    finally:
        mode.watcher, mode.idle = before
    return found[0] == found[1]


def same_values(forward: Forward, args: Any, kwargs: Any, generators: Generators) -> bool:
    """Whether a forward returns the same with and without gradients.

    Args:
        forward: Of a unit.
        args: Its arguments, with values.
        kwargs: Its keyword arguments.
        generators: That it may draw from.
    """
    found = []
    for enabled in (False, True):
        with random_state_kept(generators), torch.set_grad_enabled(enabled), disable_current_modes():
            torch.manual_seed(0)
            copies = map_tensors(_copied, (args, kwargs))
            found.append(list(tensors_in(forward(*copies[0], **copies[1]))))
    return len(found[0]) == len(found[1]) and all(map(_close, *found))


def _copied(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy * 1 if copy.requires_grad and torch.is_grad_enabled() else copy


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    tolerance = 1e-10 if one.dtype == torch.float64 else 1e-3
    return torch.allclose(one.detach(), other.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
