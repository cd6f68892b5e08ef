"""Values with a row for each sample: joined as micro-batches leave them, cut where the next ones begin."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.places import MISSING, Guard, Kept, Place
from lightning_pipeline.model.rules.trial import Merge, NoFit, Trial
from lightning_pipeline.model.rules.values import equal
from lightning_pipeline.model.tensors import flatten, is_placeholder, storage_key, unflatten

Pieces = Sequence[tuple[int, int]]
"""First sample and number of samples of each micro-batch in a run."""


class Rows:
    """Tensors with a dimension of the samples, joined along it; what a batch finds there is cut likewise.

    Args:
        dims: Of each tensor in the value.
    """

    def __init__(self, dims: list[int]) -> None:
        self.dims = dims

    def __call__(self, start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
        found = [flatten(result) for result in results]
        if any(len(tensors) != len(self.dims) for tensors, _ in found):
            raise NoFit
        columns = zip(*(tensors for tensors, _ in found), strict=True)
        joined = [torch.cat(column, dim) for column, dim in zip(columns, self.dims, strict=True)]
        return unflatten(joined, found[0][1])

    def cut(self, value: Any, begin: int, length: int, total: int) -> Any:
        """The part of a micro-batch in what the batch before left.

        Args:
            value: As it was left.
            begin: First sample of the micro-batch.
            length: Its samples.
            total: Samples of the batch.
        """
        tensors, structure = flatten(value)
        if len(tensors) != len(self.dims) or any(
            dim >= t.dim() or t.shape[dim] != total for t, dim in zip(tensors, self.dims, strict=True)
        ):
            return value
        parts = [t.narrow(dim, begin, length) for t, dim in zip(tensors, self.dims, strict=True)]
        return unflatten(parts, structure)


class RowsOfEach(Rows):
    """A list or deque in which each item has the samples in one dimension, however many items there are.

    Args:
        dim: Of the samples, in each tensor.
        length: Of a deque, at most.
    """

    def __init__(self, dim: int, length: int | None = None) -> None:
        super().__init__([dim])
        self._length = length

    def __call__(self, start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
        before = {storage_key(item): item for item in start if isinstance(item, Tensor)}
        found = list(map(list, results))
        if len({len(items) for items in found}) > 1:
            raise NoFit
        joined = [self._joined(column, before) for column in zip(*found, strict=True)]
        return deque(joined, self._length) if isinstance(start, deque) else joined

    def _joined(self, items: Sequence[Any], before: dict[int, Tensor]) -> Tensor:
        if not all(isinstance(item, Tensor) and item.dim() > self.dims[0] for item in items):
            raise NoFit
        known = before.get(storage_key(items[0]))  # what was cut of it is a view
        return torch.cat(list(items), self.dims[0]) if known is None else known

    def cut(self, value: Any, begin: int, length: int, total: int) -> Any:
        """The list with a micro-batch's rows of each item that has those of the batch."""
        dim = self.dims[0]
        items = [
            item.narrow(dim, begin, length)
            if isinstance(item, Tensor) and item.dim() > dim and item.shape[dim] == total
            else item
            for item in value
        ]
        return deque(items, self._length) if isinstance(value, deque) else items


def rows_of_each(start: Any, trial: Trial) -> RowsOfEach | None:
    """The rule for a list or deque to which each micro-batch adds items of its samples.

    Args:
        start: What stood there: empty, so that the items are those that were added.
        trial: What was left.
    """
    if not isinstance(start, list | deque) or start:
        return None
    lists = trial.one, trial.other, trial.whole
    if any(type(one) is not type(start) or len(one) != len(trial.whole) for one in lists) or not trial.whole:
        return None
    triples = list(zip(*lists, strict=True))
    if not all(isinstance(item, Tensor) for items in triples for item in items):
        return None
    dims = {_grown(*items) for items in triples}
    return (
        None if None in dims or len(dims) > 1 else RowsOfEach(dims.pop() or 0, getattr(start, "maxlen", None))
    )


def rows_in(one: Any, other: Any, whole: Any) -> Rows | None:
    """Along which dimensions `whole` is the two others."""
    (first, structure), (second, _), (both, _) = flatten(one), flatten(other), flatten(whole)
    if not first or not len(first) == len(second) == len(both):
        return None
    dims = [_grown(*tensors) for tensors in zip(first, second, both, strict=True)]
    if any(dim is None for dim in dims):
        return None
    rows = Rows([dim for dim in dims if dim is not None])
    return rows if equal(unflatten([*both], structure), rows(None, [one, other], [], _no_merge)) else None


def _grown(one: Tensor, other: Tensor, both: Tensor) -> int | None:
    if not one.dim() == other.dim() == both.dim():
        return None
    found = [d for d in range(both.dim()) if both.shape[d] == one.shape[d] + other.shape[d]]
    return found[0] if len(found) == 1 else None


def _no_merge(values: list[Any], sizes: list[int]) -> Any:
    raise NoFit


def rows_by_shape(
    one: Mapping[str, Sequence[Sequence[int]]],
    other: Mapping[str, Sequence[Sequence[int]]],
    whole: Mapping[str, Sequence[Sequence[int]]],
) -> dict[str, Rows]:
    """Which values have the samples in one dimension of each of their tensors, by label.

    Args:
        one: Shapes that a micro-batch leaves.
        other: Another one.
        whole: Both as one batch.
    """
    found = {}
    for label, shapes in one.items():
        rest = other.get(label, ()), whole.get(label, ())
        if not shapes or any(len(some) != len(shapes) for some in rest):
            continue
        dims = [_grown_alone(*three) for three in zip(shapes, *rest, strict=True)]
        if all(dim is not None for dim in dims):
            found[label] = Rows([dim for dim in dims if dim is not None])
    return found


def _grown_alone(one: Sequence[int], other: Sequence[int], both: Sequence[int]) -> int | None:
    if not len(one) == len(other) == len(both):
        return None
    grown = [d for d in range(len(both)) if both[d] == one[d] + other[d]]
    same = all(one[d] == other[d] == both[d] for d in range(len(both)) if d not in grown)
    return grown[0] if len(grown) == 1 and same else None


class StartRows:
    """Tensors with as many rows as the batch has samples, in places that its step changes.

    That they are the samples' is a guess: a step that carries nothing would not care, and one that carries
    them cannot run on a micro-batch with the rows of all. Whoever tries says which guesses were wrong.

    Args:
        places: That the step changes.
        total: Samples of the batch.
    """

    def __init__(self, places: Iterable[Place], total: int) -> None:
        self._kept = {
            place.label: (place, Kept.of(value))
            for place in places
            if not isinstance(value := place.get(), Guard) and value is not MISSING
        }
        self._total = total
        found = {label: _guesses(kept.value, total) for label, (_, kept) in self._kept.items()}
        self._left = {label: guesses for label, guesses in found.items() if guesses}

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def rules(self) -> dict[str, Rows]:
        """What is guessed now, by label."""
        return {label: guesses[0] for label, guesses in self._left.items()}

    def wrong(self, labels: Iterable[str]) -> None:
        """Make the next guess for these, or none any more."""
        for label in list(labels):
            self._left[label].pop(0)
            if not self._left[label]:
                del self._left[label]

    @contextmanager
    def of(self, pieces: Pieces) -> Iterator[None]:
        """Inside, the places have the rows of these micro-batches."""
        held = [(*self._kept[label], rows) for label, rows in self.rules.items()]
        for place, kept, rows in held:
            place.put(picked(rows, kept.value, pieces))
        try:
            yield
        finally:
            for place, kept, _ in held:
                kept.give_back(place)


def picked(rows: Rows, value: Any, pieces: Pieces) -> Any:
    """Some rows of a value.

    Args:
        rows: Where they are in it.
        value: With tensors.
        pieces: Which.
    """
    tensors, structure = flatten(value)
    cut = [
        torch.cat([tensor.narrow(dim, begin, length) for begin, length in pieces], dim)
        for tensor, dim in zip(tensors, rows.dims, strict=True)
    ]
    return unflatten(cut, structure)


def _guesses(value: Any, total: int) -> list[Rows]:
    if isinstance(value, nn.Parameter):  # as large as the batch by chance
        return []
    tensors: list[Tensor] = flatten(value)[0] if isinstance(value, Tensor | list | tuple | dict) else []
    if not tensors or any(map(is_placeholder, tensors)):
        return []
    dims = [[d for d, size in enumerate(tensor.shape) if size == total] for tensor in tensors]
    if not all(dims):
        return []
    return [Rows([each[min(n, len(each) - 1)] for each in dims]) for n in range(max(map(len, dims)))]
