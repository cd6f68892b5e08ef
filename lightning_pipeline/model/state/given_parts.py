"""Parts of a vector that a hook gives to weights, as `vector_to_parameters` does."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import storage_key

_WAY_OUT = "give each weight a copy (`weight.data = part.clone()`)"


def is_part(tensor: Tensor) -> bool:
    """Whether its memory is a part of that of a larger tensor."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


class GivenParts:
    """Vectors whose parts weights were given: on one device these share memory with it, and here have copies.

    A copy is as good while nobody can tell: where parts are apart, and the vector is not used later on.
    """

    def __init__(self) -> None:
        self._vectors: dict[int, StorageWeakRef] = {}
        self._of_hook: dict[int, list[tuple[int, int]]] = {}

    def begin(self) -> None:
        """A hook begins."""
        self._of_hook.clear()
        self._vectors = {key: vector for key, vector in self._vectors.items() if not vector.expired()}

    def copy(self, part: Tensor) -> Tensor:
        """What a weight is given in the place of a part.

        Raises:
            SplitError: Another weight was given some of it.
        """
        strides = zip(part.shape, part.stride(), strict=True)
        begin = int(part.storage_offset())
        end = begin + 1 + sum((int(size) - 1) * int(stride) for size, stride in strides)
        key = storage_key(part)
        given = self._of_hook.setdefault(key, [])
        if any(begin < other and one < end for one, other in given):
            raise SplitError(
                "two weights are given the same part of a vector, so that a change of one is one of the "
                f"other: {_WAY_OUT}"
            )
        given.append((begin, end))
        self._vectors[key] = StorageWeakRef(part.untyped_storage())
        return part.clone()

    def check(self, used: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """An operation comes.

        Args:
            used: All of its operands.
            written: Those that it writes.

        Raises:
            SplitError: It uses a vector whose weights may have changed, or changes one that weights have.
        """
        keys = {storage_key(one) for one in used if one.layout is torch.strided} & self._vectors.keys()
        changed = {storage_key(one) for one in written if one.layout is torch.strided}
        if keys - self._of_hook.keys() or keys & changed:
            raise SplitError(
                "a vector whose parts weights were given is used again: on one device it shares memory with "
                f"them. Make it anew, or {_WAY_OUT}"
            )

    def __bool__(self) -> bool:
        return bool(self._vectors)
