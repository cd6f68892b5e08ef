"""What units return for batches of other sizes, from what they returned for several.

Texts have another length in each batch. What units return need not be traced for each: a size that was the
length of the batch, or half of it rounded down, for all batches seen is so for a batch between them.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

from lightning_pipeline.model.tensors import TensorSpec
from lightning_pipeline.model.trace import Call, Trace

_FEWEST = 6  # batches, and values of a size of theirs, before one between them is taken for one of these
_MOST = 64  # batches that are kept
_OF_A_REST = 8  # sizes of each rest that a division leaves
_DIVISORS = (2, 3, 4, 5, 6, 7, 8, 14, 16, 32)
Column = tuple[int, ...]
"""One size, for each batch that was seen."""


class SizeLaws:
    """Of the units that a step calls on one way through the model, with all else alike."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], Sequence[Call]] = {}  # by the sizes of the batch
        self._form: Hashable = None

    def learn(self, trace: Trace) -> None:
        """Take in what was traced; what has another form than before makes a beginning."""
        shape, sizes = _taken_apart(trace.arguments)
        form = shape, tuple(map(_form_of, trace.calls))
        if form != self._form:
            self._seen.clear()
        self._form = form
        if len(self._seen) == _MOST:
            del self._seen[next(iter(self._seen))]
        self._seen[sizes] = trace.calls

    def calls(self, arguments: Hashable) -> list[Call] | None:
        """The calls for such arguments, or None where that is not sure.

        Args:
            arguments: What `signature_of` gives.
        """
        shape, sizes = _taken_apart(arguments)
        known = len(self._seen) >= _FEWEST and shape == self._form[0]  # type: ignore[index]
        if not known or not self._is_between(sizes):
            return None
        law = _Law(list(self._seen), sizes)
        every = list(self._seen.values())
        try:
            return [_call(law, calls) for calls in zip(*every, strict=True)]
        except _UnsureError:
            return None

    def _is_between(self, sizes: Sequence[int]) -> bool:
        """Whether each is one that was seen, or lies among several by whose distances it can be reached.

        Where all that were seen are multiples of eight, another number is not: a unit may fill up to these.
        """
        for now, column in zip(sizes, zip(*self._seen, strict=True), strict=True):
            known = sorted(set(column))
            if now not in known:
                between = len(known) >= _FEWEST and known[0] < now < known[-1]
                if not between or not _is_reached(now, known):
                    return False
        return True


def _is_reached(now: int, known: Sequence[int]) -> bool:
    """Whether distances of the known ones lead there, without any one of them, too."""
    for left_out in range(len(known)):
        first, *others = (*known[:left_out], *known[left_out + 1 :])
        if (now - first) % math.gcd(*(one - first for one in others)):
            return False
    return True


class _UnsureError(Exception):
    """No rule is known to fit, or several that say different things."""


class _Law:
    """Says what a size is for a batch, from what it was for others.

    Args:
        seen: Sizes of these.
        now: Sizes of the batch.
    """

    def __init__(self, seen: Sequence[Sequence[int]], now: Sequence[int]) -> None:
        columns = {(tuple(column), one) for column, one in zip(zip(*seen, strict=True), now, strict=True)}
        self._columns = sorted(column for column in columns if {*column[0]} != {column[1]})
        self._known: dict[Column, int] = {}

    def __call__(self, column: Column) -> int:
        if column not in self._known:
            found = set(self._found(column))
            if len(found) != 1:
                raise _UnsureError
            self._known[column] = found.pop()
        return self._known[column]

    def _found(self, column: Column) -> Iterator[int]:
        """What each rule says that fits all batches seen."""
        if len(set(column)) == 1:
            yield column[0]
        for sizes, now in self._columns:
            yield from _by_one(column, sizes, now)
        for one, other in combinations_with_replacement(self._columns, 2):
            products = [a * b for a, b in zip(one[0], other[0], strict=True)]
            yield from _multiple(column, products, one[1] * other[1])
            sums = {v - a - b for v, a, b in zip(column, one[0], other[0], strict=True)}
            if len(sums) == 1 and one is not other:
                yield one[1] + other[1] + sums.pop()


def _by_one(column: Column, sizes: Column, now: int) -> Iterator[int]:
    """A multiple of one size and something, or a part of it and something, rounded down."""
    low, high = sizes.index(min(sizes)), sizes.index(max(sizes))
    run, rise = sizes[high] - sizes[low], column[high] - column[low]
    if run and rise and rise % run == 0:
        slope = rise // run
        if len({value - slope * size for value, size in zip(column, sizes, strict=True)}) == 1:
            yield column[0] + slope * (now - sizes[0])
    for divisor in _DIVISORS:
        rests = Counter(size % divisor for size in set(sizes))
        if len(rests) < divisor or min(rests.values()) < _OF_A_REST:
            continue
        least = max(value * divisor - size for value, size in zip(column, sizes, strict=True))
        most = min(value * divisor - size for value, size in zip(column, sizes, strict=True)) + divisor - 1
        if least == most:  # else other batches could decide
            yield (now + least) // divisor


def _multiple(column: Column, products: Sequence[int], now: int) -> Iterator[int]:
    if products[0] and column[0] % products[0] == 0:
        factor = column[0] // products[0]
        if all(value == factor * product for value, product in zip(column, products, strict=True)):
            yield factor * now


def _taken_apart(value: Any) -> tuple[Hashable, tuple[int, ...]]:
    """Nested tuples without their numbers, and these."""
    sizes: list[int] = []

    def without(one: Any) -> Any:
        if type(one) is int:
            sizes.append(one)
            return int
        return tuple(map(without, one)) if isinstance(one, tuple) else one

    return without(value), tuple(sizes)


def _form_of(call: Call) -> Hashable:
    """All of a call but its sizes."""
    inputs = tuple((len(shape), dtype) for shape, dtype in call.inputs)
    outputs = tuple(
        (len(spec.shape), _order_of(spec), spec.dtype, spec.device, spec.requires_grad) for spec in call.specs
    )
    return call.unit, call.nth, call.structure, inputs, outputs


class _Order(NamedTuple):
    dimensions: tuple[int, ...]  # from the one with the largest stride on


def _order_of(spec: TensorSpec) -> Hashable:
    """How its elements lie in memory; what fits no order is like nothing else."""
    stride = spec.stride
    if stride is None:
        return None
    in_order = _Order(tuple(range(len(stride))))
    by_stride = _Order(tuple(sorted(in_order.dimensions, key=lambda dimension: -stride[dimension])))
    fitting = (order for order in (in_order, by_stride) if _strides(order, spec.shape) == stride)
    return next(fitting, object())


def _strides(order: _Order, shape: Sequence[int]) -> tuple[int, ...]:
    strides, following = [0] * len(shape), 1
    for dimension in reversed(order.dimensions):
        strides[dimension] = following
        following *= max(shape[dimension], 1)
    return tuple(strides)


def _call(law: Callable[[Column], int], calls: Sequence[Call]) -> Call:
    """One call as it is for the batch, from what it was for others."""
    first = calls[0]
    inputs = tuple(
        (tuple(map(law, zip(*(call.inputs[place][0] for call in calls), strict=True))), dtype)
        for place, (_, dtype) in enumerate(first.inputs)
    )
    specs = [_spec(law, [call.specs[place] for call in calls]) for place in range(len(first.specs))]
    return replace(first, inputs=inputs, specs=specs)


def _spec(law: Callable[[Column], int], specs: Sequence[TensorSpec]) -> TensorSpec:
    shape = tuple(map(law, zip(*(spec.shape for spec in specs), strict=True)))
    order = _order_of(specs[0])
    stride = _strides(order, shape) if isinstance(order, _Order) else None
    return specs[0]._replace(shape=shape, stride=stride)
