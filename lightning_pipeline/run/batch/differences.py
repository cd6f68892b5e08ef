"""Nested values, part by part: what differs, and one with parts of the other in it."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.data import items_of, rebuilt
from lightning_pipeline.errors import ConfigurationError

_PRECISE = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-3, 1e-5)}  # relative and absolute
_ROUGH = (5e-2, 5e-2)
_WHOLE = (str, bytes, type(None), set)
_NUMBERS = (bool, int, float, complex)


class MergeFailure(NamedTuple):
    """Stands for what no rule puts together.

    Attributes:
        error: What the rules said.
        parts: The entries of a dictionary, of which some say so when they are read; None: there are none.
    """

    error: ConfigurationError
    parts: dict[Any, Any] | None = None


class Difference(NamedTuple):
    """A part of a value that is another one for the batch as one.

    Attributes:
        place: The keys that lead to it.
        mine: What was put together, in words.
        theirs: What the batch as one has, in words.
        value: What the batch as one has.
    """

    place: tuple[Any, ...]
    mine: str
    theirs: str
    value: Any

    @property
    def name(self) -> str:
        """Where it stands, as one writes it."""
        return written(self.place)

    def is_among(self, others: Sequence["Difference"]) -> bool:
        """Whether another run of the step says the same."""
        return any(
            other.place == self.place and not any(differences(self.value, other.value)) for other in others
        )


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Relative and absolute difference of numbers of this type that may be rounding."""
    return _PRECISE.get(dtype, _ROUGH)


def differences(
    mine: Any, theirs: Any, place: tuple[Any, ...] = (), *, exactly: bool = False
) -> Iterator[Difference]:
    """Parts that differ.

    Args:
        mine: What was put together; `MergeFailure` where no rule did.
        theirs: What the batch as one has.
        place: The keys that have led here.
        exactly: Whether what may be rounding counts, too.
    """
    one, other = _as_tensor(mine, exactly=exactly), _as_tensor(theirs, exactly=exactly)
    if isinstance(mine, MergeFailure):
        yield Difference(place, "what no rule puts together", "something", theirs)
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        words = _differing(one, other, exactly=exactly)
        if words is not None:
            yield Difference(place, *words, theirs)
    elif type(mine) is not type(theirs):
        yield Difference(place, f"a {type(mine).__name__}", f"a {type(theirs).__name__}", theirs)
    elif isinstance(mine, _WHOLE):
        if mine != theirs:
            yield Difference(place, repr(mine), repr(theirs), theirs)
    elif keys_of(mine) != keys_of(theirs):
        yield Difference(place, f"{len(keys_of(mine))} items", f"{len(keys_of(theirs))} items", theirs)
    else:
        for key, one, other in zip(keys_of(mine), _items(mine), _items(theirs), strict=True):
            yield from differences(one, other, (*place, key), exactly=exactly)


def with_parts(output: Any, found: Sequence[Difference]) -> Any:
    """What was put together with the parts of the batch as one in it."""
    if not found:
        return output
    if own := [one.value for one in found if not one.place]:
        return own[0]
    below: dict[Any, list[Difference]] = {}
    for one in found:
        below.setdefault(one.place[0], []).append(one._replace(place=one.place[1:]))
    return rebuilt(output, lambda item, key: with_parts(item, below.get(key, [])))


def written(place: tuple[Any, ...]) -> str:
    """Keys as one writes them."""
    return "".join(f"[{key!r}]" for key in place)


def keys_of(value: Any) -> list[Any]:
    """What `items_of` has its items by."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, list | tuple | deque):
        return list(range(len(value)))
    return [field.name for field in fields(value)] if items_of(value) else []


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, deque) else items_of(value)


def _as_tensor(value: Any, *, exactly: bool) -> Any:
    """The same where it is an array, a number or a list of numbers.

    Python's numbers may have been read of tensors of any precision: they are compared as torch's usual.
    """
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.as_tensor(value)
    several = isinstance(value, list) and value and all(type(one) in _NUMBERS for one in value)
    if type(value) not in _NUMBERS and not several:
        return value
    numbers = torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
    return numbers.float() if numbers.is_floating_point() and not exactly else numbers


def _differing(mine: Tensor, theirs: Tensor, *, exactly: bool) -> tuple[str, str] | None:
    """In words, how two tensors differ; None where they do not."""
    if mine.shape != theirs.shape:
        return f"shape {tuple(mine.shape)}", f"shape {tuple(theirs.shape)}"
    if mine.layout is not torch.strided or theirs.layout is not torch.strided or not mine.numel():
        return None
    exact = exactly or not (mine.is_floating_point() or mine.is_complex())
    relative, absolute = (0.0, 0.0) if exact else tolerances(mine.dtype)
    kind = torch.complex128 if mine.is_complex() or theirs.is_complex() else torch.float64
    ours, other = mine.to(kind).flatten(), theirs.to(mine.device, kind).flatten()
    sizes = other[other.isfinite()].abs()
    bound = absolute + relative * (float(sizes.max()) if sizes.numel() else 0.0)
    away = (ours - other).abs()
    away = torch.where((ours == other) | (ours.isnan() & other.isnan()), 0.0, away.nan_to_num(nan=math.inf))
    worst = int(away.argmax())
    if float(away[worst]) <= bound:
        return None
    return _word(ours[worst].item()), _word(other[worst].item())


def _word(number: Any) -> str:
    return f"{number:.6g}"
