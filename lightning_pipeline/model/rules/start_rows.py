"""What a batch begins with, cut as the batch is, while it is not known yet how micro-batches leave it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.rules.rows import Rows
from lightning_pipeline.model.tensors import flatten, is_placeholder, unflatten
from lightning_pipeline.model.trace import MISSING, Guard, Kept, Place

Pieces = Sequence[tuple[int, int]]
"""First sample and number of samples of each micro-batch in a run."""


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
