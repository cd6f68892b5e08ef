"""What a tensor came from: sets of tags kept per storage, so that views and in-place writes share them."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeline.model.tensors.operations import storage_key


class Tag(NamedTuple):
    """One origin of a value.

    `kind` is "value" (output `leaf` of call `call`), "state" (the parameter or buffer called `name`),
    "effect" (something that call `call` changed beside its output), "saved" (keeps memory number `call`) or
    "changed" (shares memory with an output of call `call` that was changed at the line `name`).
    """

    kind: str
    call: int = -1
    leaf: int = 0
    name: str = ""


NO_TAGS: frozenset[Tag] = frozenset()


class TagStore:
    """Tags by storage. Storages that are gone are forgotten; their address cannot be reused meanwhile."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[StorageWeakRef, frozenset[Tag]]] = {}

    def of(self, tensor: Tensor) -> frozenset[Tag]:
        """The tags of the memory behind `tensor`."""
        found = self._tags.get(storage_key(tensor))
        return NO_TAGS if found is None else found[1]

    def union(self, tensors: Iterable[Tensor]) -> frozenset[Tag]:
        """The tags of all of them together."""
        result = NO_TAGS
        for tensor in tensors:
            found = self.of(tensor)
            if found and not found <= result:
                result |= found
        return result

    def add(self, tensor: Tensor, tags: frozenset[Tag]) -> None:
        """Add tags to the memory behind `tensor`."""
        if tags:
            self.add_to(tensor.untyped_storage(), tags)

    def add_to(self, memory: UntypedStorage, tags: frozenset[Tag]) -> None:
        """Add tags to a piece of memory."""
        key = int(memory._cdata)
        known = self._tags.get(key)
        if known is None:
            self._tags[key] = (StorageWeakRef(memory), tags)
        elif not tags <= known[1]:
            self._tags[key] = (known[0], known[1] | tags)

    def replace(self, tensor: Tensor, tags: frozenset[Tag]) -> None:
        """Set the tags of the memory behind `tensor` to just these."""
        self._tags[storage_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), tags)
