"""What a step does to the batch that it is given, which hooks after it are to find done."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.model.places.owners import MISSING
from lightning_pipeline.model.tensors import map_tensors, tensors_in, version_of


class BatchChanges(NamedTuple):
    """What one run has changed.

    Attributes:
        put: Entries of a batch that is a dictionary, which were added or replaced.
        taken: Keys that were taken out.
        written: Tensors of the batch that were written in place, by their number in it.
        tensors: How many the batch has.
    """

    put: dict[Any, Any]
    taken: tuple[Any, ...]
    written: dict[int, Tensor]
    tensors: int

    def __bool__(self) -> bool:
        return bool(self.put or self.taken or self.written)


class BatchAsGiven:
    """What a step is given, before it runs: containers of its own.

    Args:
        args: Arguments of the step.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self._batch = args[0] if args else None
        self._entries = dict(self._batch) if type(self._batch) is dict else None
        self._tensors = [(tensor, version_of(tensor)) for tensor in tensors_in(self._batch)]

    @property
    def is_refilled(self) -> bool:
        """After the step: whether it has put entries in, or taken some out."""
        put, taken = self._refilled()
        return bool(put or taken)

    def changes(self) -> BatchChanges:
        """After the step: what it has changed; its tensors without their graph."""
        written = {
            number: tensor.detach()
            for number, (tensor, version) in enumerate(self._tensors)
            if version_of(tensor) != version
        }
        put, taken = self._refilled()
        return BatchChanges(map_tensors(Tensor.detach, put), taken, written, len(self._tensors))

    def _refilled(self) -> tuple[dict[Any, Any], tuple[Any, ...]]:
        """Entries that were put in, and keys of those that were taken out."""
        if self._entries is None or self._batch is None:
            return {}, ()
        put = {key: v for key, v in self._batch.items() if self._entries.get(key, MISSING) is not v}
        return put, tuple(key for key in self._entries if key not in self._batch)


def write_into(batch: Any, changes: Sequence[BatchChanges], sizes: Sequence[int]) -> dict[int, Tensor]:
    """Write into the tensors of a batch what its micro-batches have in theirs.

    Args:
        batch: The whole.
        changes: By micro-batch, which are cut of it by rows.
        sizes: Samples of each.

    Returns:
        The tensors that were written, by number.
    """
    found, tensors = {}, list(tensors_in(batch))
    if any(one.tensors != len(tensors) for one in changes):  # lists of samples, of which each has its own
        return {}
    for number, tensor in enumerate(tensors):
        begin = 0
        for one, size in zip(changes, sizes, strict=True):
            part = one.written.get(number)
            by_rows = tensor.dim() > 0 and tensor.shape[0] == sum(sizes)
            place = tensor.narrow(0, begin, size) if by_rows else tensor
            if part is not None and part.shape == place.shape and (by_rows or len(sizes) == 1):
                with torch.no_grad():
                    place.copy_(part)
                found[number] = tensor
            begin += size
    return found
