"""Which of a module's tensors a tensor comes from."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeline._torch import DisableTorchFunction, beneath_transforms
from lightning_pipeline.model.state.absent import stands_for
from lightning_pipeline.model.tensors import is_placeholder, storage_key

Names = frozenset[str]
NOTHING: Names = frozenset()


class Sources:
    """Which of the module's tensors a tensor comes from, by its memory; views of placeholders share it too.

    Args:
        listed: Gives what this rank holds: name, and the tensors that are known by it.
    """

    def __init__(self, listed: Callable[[], Iterable[tuple[str, Iterable[Tensor]]]]) -> None:
        self._listed = listed
        # A weak reference keeps the number of a storage from being given to another one.
        self._known: dict[int, tuple[StorageWeakRef, Names]] = {}
        self._derived: dict[int, tuple[StorageWeakRef, Names]] = {}
        self._stale = True

    def forget(self) -> None:
        """What the module holds has changed: new gradients, new state of optimizers."""
        self._stale = True

    def of(self, tensor: Tensor) -> Names:
        """Names that a tensor's values come from, where these are not known to all ranks."""
        if tensor.layout is not torch.strided:
            return NOTHING
        if self._stale:
            self._look()
        tensor = beneath_transforms(tensor)
        key = storage_key(tensor)
        entry = self._known.get(key) or self._derived.get(key)
        if entry is not None:
            return entry[1]
        return frozenset(stands_for(tensor)) if is_placeholder(tensor) else NOTHING

    def _look(self) -> None:
        with DisableTorchFunction():  # here it is no hook that asks for `.grad`
            self._known = {
                storage_key(tensor): (StorageWeakRef(tensor.untyped_storage()), frozenset({name}))
                for name, tensors in self._listed()
                for tensor in tensors
                if tensor.layout is torch.strided
            }
        self._derived = {key: entry for key, entry in self._derived.items() if not entry[0].expired()}
        self._stale = False

    def is_listed(self, tensor: Tensor) -> bool:
        """Whether it is one of the module's own, or a view of one."""
        if self._stale:
            self._look()
        return storage_key(tensor) in self._known

    def note(self, tensor: Tensor, names: Names) -> None:
        """A result comes from these; a tensor of the module stays what it is, whatever is written into it."""
        if names and tensor.layout is torch.strided and storage_key(tensor) not in self._known:
            self._derived[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), names
