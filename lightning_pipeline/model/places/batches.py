"""What a step does to the batch that it is given, which hooks after it are to find done."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.data import items_of
from lightning_pipeline.model.places.owners import MISSING
from lightning_pipeline.model.tensors import map_tensors, tensors_in, version_of


class BatchChanges(NamedTuple):
    """What one run has changed.

    Attributes:
        put: Entries of a batch that is a dictionary, which were added or replaced.
        taken: Keys that were taken out.
        given: The batch as it was given.
        written: Tensors in that which were written in place, by `id`.
    """

    put: dict[Any, Any]
    taken: tuple[Any, ...]
    given: Any
    written: frozenset[int]

    def __bool__(self) -> bool:
        return bool(self.put or self.taken or self.written)


class BatchAsGiven:
    """What a step is given, before it runs: containers of its own.

    Args:
        args: Arguments of the step.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self._batch: Any = args[0] if args else None
        self._given: Any = dict(self._batch) if type(self._batch) is dict else self._batch
        self._tensors = [(tensor, version_of(tensor)) for tensor in tensors_in(self._batch)]

    @property
    def is_refilled(self) -> bool:
        """After the step: whether it has put entries in, or taken some out."""
        put, taken = self._refilled()
        return bool(put or taken)

    def changes(self) -> BatchChanges:
        """After the step: what it has changed; what it has put in is without its graph."""
        put, taken = self._refilled()
        written = frozenset(id(tensor) for tensor, version in self._tensors if version_of(tensor) != version)
        return BatchChanges(map_tensors(Tensor.detach, put), taken, self._given, written)

    def _refilled(self) -> tuple[dict[Any, Any], tuple[Any, ...]]:
        """Entries that were put in, and keys of those that were taken out."""
        if type(self._batch) is not dict:
            return {}, ()
        put = {key: v for key, v in self._batch.items() if self._given.get(key, MISSING) is not v}
        return put, tuple(key for key in self._given if key not in self._batch)


def write_into(batch: Any, changes: Sequence[BatchChanges], sizes: Sequence[int]) -> dict[int, Tensor]:
    """Write into the tensors of a batch what its micro-batches have in theirs.

    Args:
        batch: The whole.
        changes: By micro-batch, which are cut of it by rows.
        sizes: Samples of each.

    Returns:
        The tensors that were written, by their number in the batch.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(tensors_in(batch))}
    found, begin = dict[int, Tensor](), 0
    for one, size in zip(changes, sizes, strict=True):
        for tensor, place, part in _pairs(batch, one.given, begin, size, sum(sizes)) if one.written else ():
            if id(part) in one.written:
                with torch.no_grad():
                    place.copy_(part)
                found[numbers[id(tensor)]] = tensor
        begin += size
    return found


def _pairs(
    whole: Any, part: Any, begin: int, size: int, total: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tensors of a batch, where a micro-batch has its own in them, and what it has."""
    if isinstance(whole, Tensor) and isinstance(part, Tensor):
        by_rows = whole.dim() > 0 and whole.shape[0] == total
        place = whole.narrow(0, begin, size) if by_rows and whole.shape != part.shape else whole
        if place.shape == part.shape:
            yield whole, place, part
        return
    wholes, parts = list(items_of(whole)), list(items_of(part))
    if isinstance(part, list | tuple) and (len(wholes), len(parts)) == (total, size):
        wholes = wholes[begin : begin + size]  # an item for each sample
    for one, other in zip(wholes, parts, strict=True) if len(wholes) == len(parts) else ():
        yield from _pairs(one, other, begin, size, total)
