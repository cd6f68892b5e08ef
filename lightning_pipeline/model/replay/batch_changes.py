"""What a step does to the batch that it is given, which hooks after it are to find done."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.model.tensors import map_tensors, tensors_in, version_of

_MISSING = object()


class BatchChanges(NamedTuple):
    """What one run has changed.

    Attributes:
        put: Entries of a batch that is a dictionary, which were added or replaced.
        taken: Keys that were taken out.
        written: Tensors of the batch that were written in place, by their number in it.
    """

    put: dict[Any, Any]
    taken: tuple[Any, ...]
    written: dict[int, Tensor]

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

    def changes(self) -> BatchChanges:
        """After the step: what it has changed; its tensors without their graph."""
        written = {
            number: tensor.detach()
            for number, (tensor, version) in enumerate(self._tensors)
            if version_of(tensor) != version
        }
        if self._entries is None or self._batch is None:
            return BatchChanges({}, (), written)
        put = {key: v for key, v in self._batch.items() if self._entries.get(key, _MISSING) is not v}
        taken = tuple(key for key in self._entries if key not in self._batch)
        return BatchChanges(map_tensors(Tensor.detach, put), taken, written)


def write_into(batch: Any, written: Sequence[dict[int, Tensor]], sizes: Sequence[int]) -> dict[int, Tensor]:
    """Write into the tensors of a batch what its micro-batches have in theirs.

    Args:
        batch: The whole.
        written: By micro-batch and number of the tensor.
        sizes: Samples of each.

    Returns:
        The tensors that were written, by number.
    """
    found = {}
    for number, tensor in enumerate(tensors_in(batch)):
        parts = [one.get(number) for one in written]
        begin = 0
        for part, size in zip(parts, sizes, strict=True):
            if part is not None and part.shape == tensor.shape and len(sizes) == 1:
                place = tensor
            elif part is not None and tensor.dim() and part.shape == (size, *tensor.shape[1:]):
                place = tensor.narrow(0, begin, size)
            else:
                place = None
            if place is not None and part is not None:
                with torch.no_grad():
                    place.copy_(part)
                found[number] = tensor
            begin += size
    return found
