"""Numbers that are no sum over samples: the root of a mean, a quotient of two sums, a largest value.

A batch's is not made of its micro-batches', but of the sums that these begin with. So what is kept of one is
how it was worked out; the batch's is worked out once more, from the batch's sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pipeline.model.loss.events import Share
from lightning_pipeline.model.tensors import is_placeholder, map_tensors


class _Known(Protocol):
    def of(self, value: Any) -> Share | None: ...
    def bent(self, value: Any) -> "Bent | None": ...


class DifferentWaysError(Exception):
    """Micro-batches have worked a number out in ways that cannot be put together."""


@dataclass(frozen=True)
class Leaf:
    """What a number begins with: this micro-batch's part of it.

    Attributes:
        part: Its value.
        together: Makes of all parts, one above the other, the batch's; None: nobody knows.
        origin: What its factors were read from, as of a share.
    """

    part: Tensor
    together: Callable[[Tensor], Tensor] | None
    origin: int = 0


@dataclass(frozen=True)
class Bent:
    """A call that makes a number of others.

    Attributes:
        func: What was called; None: this is what the one argument is.
        args: Its arguments, a `Leaf` or `Bent` for each number that is followed.
        kwargs: Likewise.
        always: Whether a share of the result would be wrong: it is made of one that is bent.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    always: bool = False

    def origins(self) -> set[int]:
        """Of all that it begins with."""
        return {leaf.origin for leaf in _leaves((self.args, self.kwargs))}


def bend(known: _Known, func: Any, args: Any, kwargs: Any) -> Bent | None:
    """How a call makes a number of numbers of the batch; None where it makes none, or of something else.

    Args:
        known: What is known of its arguments.
        func: That is about to be called.
        args: Its arguments.
        kwargs: Likewise.
    """
    found: list[bool] = []
    others: list[Tensor] = []

    def noted(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [noted(item) for item in value]
        if not isinstance(value, Tensor | float):
            return value
        share, bent = known.of(value), known.bent(value)
        if bent is not None:
            found.append(True)
            return bent
        if share is not None and share.single and not share.lost:
            found.append(False)
            parts = [tensor.detach().double() * factor for factor, tensor in share.terms if factor]
            return Leaf(sum(parts, torch.zeros((), dtype=torch.float64)), _summed, share.origin)
        if share is not None and isinstance(value, Tensor):
            others.append(value)
        return value

    made = tuple(map(noted, args)), {name: noted(value) for name, value in kwargs.items()}
    if not found or others:
        return None
    if func is Tensor.__setitem__:
        args, kwargs = map_tensors(lambda tensor: tensor.detach().clone(), made)
        return Bent(_with_item, args, kwargs, always=True)
    args, kwargs = map_tensors(lambda tensor: tensor.detach(), made)
    return Bent(func, args, kwargs, always=any(found))


def extreme(func: Any, args: Any, result: Any) -> Bent | None:
    """What a call makes of samples that is one number and no sum of theirs; None where it does not.

    Args:
        func: That was called.
        args: Its arguments.
        result: Of the call.
    """
    if func not in _REDUCING or len(args) != 1 or not isinstance(args[0], Tensor):
        return None
    if not isinstance(result, Tensor) or is_placeholder(result) or result.numel() != 1 == args[0].numel():
        return None
    return Bent(None, (Leaf(result.detach().clone(), _REDUCING[func]),), always=True)


def together(found: Sequence[Bent]) -> Tensor:
    """The batch's number.

    Args:
        found: How each micro-batch has worked it out.

    Raises:
        DifferentWaysError: Not in one way, or with other numbers beside.
    """
    try:
        result = _Together().of(list(found))
    except (RuntimeError, TypeError, ValueError) as error:
        raise DifferentWaysError from error
    if not isinstance(result, Tensor):
        result = torch.as_tensor(result, dtype=torch.float64)
    return result.detach().double().reshape(())


class _Together:
    """Works out once what is used several times."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, ...], Any] = {}

    def of(self, values: list[Any]) -> Any:
        """One value of one per micro-batch."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise DifferentWaysError
        if isinstance(first, Bent):
            key = tuple(map(id, values))
            if key not in self._done:
                self._done[key] = self._called(values)
            return self._done[key]
        if isinstance(first, Leaf):
            return _leaf(values)
        if isinstance(first, list | tuple):
            if len({len(value) for value in values}) != 1:
                raise DifferentWaysError
            return type(first)(self.of(list(column)) for column in zip(*values, strict=True))
        if isinstance(first, Tensor):
            if not all(value.shape == first.shape and torch.equal(value, first) for value in values):
                raise DifferentWaysError
            return first.double() if first.is_floating_point() else first
        if any(value is not first and value != first for value in values):
            raise DifferentWaysError
        return first

    def _called(self, values: list[Bent]) -> Any:
        first = values[0]
        if any(
            value.func is not first.func or value.kwargs.keys() != first.kwargs.keys() for value in values
        ):
            raise DifferentWaysError
        args = self.of([value.args for value in values])
        kwargs = {name: self.of([value.kwargs[name] for value in values]) for name in first.kwargs}
        return args[0] if first.func is None else first.func(*args, **kwargs)


def _leaf(values: list[Leaf]) -> Tensor:
    parts = [value.part for value in values]
    shape = torch.broadcast_shapes(*(part.shape for part in parts))
    stacked = torch.stack([part.to(torch.float64).expand(shape) for part in parts])
    if values[0].together is not None:
        return values[0].together(stacked)
    if not bool((stacked == stacked[0]).all()):
        raise DifferentWaysError
    return stacked[0]


def _leaves(value: Any) -> list[Leaf]:
    if isinstance(value, Leaf):
        return [value]
    if isinstance(value, Bent):
        return _leaves((value.args, value.kwargs))
    if isinstance(value, dict):
        return _leaves(tuple(value.values()))
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list | tuple) else []


def _with_item(value: Tensor, index: Any, item: Any) -> Tensor:
    """`value[index] = item`, in a copy."""
    copy = value.clone()
    copy[index] = item.to(copy.dtype) if isinstance(item, Tensor) else item
    return copy


def _summed(parts: Tensor) -> Tensor:
    return parts.sum(0)


def _largest(parts: Tensor) -> Tensor:
    return parts.amax(0)


def _smallest(parts: Tensor) -> Tensor:
    return parts.amin(0)


def _of_both(names: str) -> list[Any]:
    return [
        getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)
    ]


_REDUCING: dict[Any, Callable[[Tensor], Tensor] | None] = {
    **dict.fromkeys(_of_both("max amax"), _largest),
    **dict.fromkeys(_of_both("min amin"), _smallest),
    **dict.fromkeys(_of_both("std var median norm nanmedian prod"), None),
}
"""Of samples one number, and what makes the batch's of those of the micro-batches; None: nothing does."""
