"""Values that a step leaves: whether two are the same, and copies that no later step changes."""

from collections import deque
from collections.abc import Set
from types import FunctionType
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_pipeline.model.tensors import dict_like


def own_containers(value: Any, known: Set[int] = frozenset(), depth: int = 8) -> Any:
    """The same with lists, deques, dictionaries and sets of its own; tensors without their graph.

    Args:
        value: Anything.
        known: Identities of what stays as it is.
        depth: How far down to go.
    """
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if id(value) in known or not depth:
        return value
    if type(value) in (list, tuple):
        return type(value)(own_containers(item, known, depth - 1) for item in value)
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return dict_like(value, {k: own_containers(item, known, depth - 1) for k, item in value.items()})
    if isinstance(value, deque):
        return deque((own_containers(item, known, depth - 1) for item in value), value.maxlen)
    return value.copy() if type(value) is set else value


def is_number(value: Any) -> bool:
    """Whether it is a number of Python's and no flag."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same up to rounding."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _close(one, other)
    if isinstance(one, numpy.ndarray | numpy.generic) and type(one) is type(other):
        return one.dtype == other.dtype and equal(one.tolist(), other.tolist())
    if is_number(one) and is_number(other):
        exact = isinstance(one, int) and isinstance(other, int)
        return bool(one == other) if exact else abs(one - other) <= 1e-4 * max(abs(one), abs(other), 1e-6)
    if isinstance(one, type) and isinstance(other, type):
        return _are_made_alike(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(equal, one, other))
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _are_made_alike(one: type, other: type) -> bool:
    """Whether two classes are those that the same lines make when they run twice."""
    if one is other:
        return True
    if (one.__module__, one.__qualname__) != (other.__module__, other.__qualname__):
        return False
    if vars(one).keys() != vars(other).keys() or len(one.__bases__) != len(other.__bases__):
        return False
    if not all(map(_are_made_alike, one.__bases__, other.__bases__)):
        return False
    return all(_are_written_alike(value, vars(other)[name]) for name, value in vars(one).items())


def _are_written_alike(one: Any, other: Any) -> bool:
    """Whether an entry of a class is what the same lines make; of what has no code that tells, its type."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ == other.__code__ and one.__defaults__ == other.__defaults__
    if isinstance(one, tuple | str | int | float | None):
        return bool(one == other)
    return type(one) is type(other)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)
