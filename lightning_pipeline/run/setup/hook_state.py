"""What hooks that a batch goes through on its way to the device may reach: as it stands, to be put back."""

import copy
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_pipeline.model.random import is_generator, set_state, state_of
from lightning_pipeline.model.tensors import (
    ModuleState,
    contents_of,
    filled_by,
    is_array,
    is_placeholder,
    items_of,
    put_back,
    refill,
    version_of,
)

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_DEEP, _MOST, _LONG = 8, 20_000, 1000  # levels and objects that are looked into, and the longest container
_SMALL = 1 << 16  # elements of a tensor


class HookState:
    """Generators, iterators, tensors, arrays, containers and objects below a module or data module.

    What holds the data is not looked into: hooks are given a batch of it. Objects of libraries stand as they
    do: a thread, a queue or a loader's iterator is more than its attributes. An iterator that can be copied
    has a copy in its place until `restore`.

    Args:
        owners: The LightningModule, of which everything else is kept elsewhere, and a data module.
    """

    def __init__(self, *owners: Any) -> None:
        self._generators: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        self._held: list[tuple[Any, Any]] = []
        self._modules: list[ModuleState] = []
        self._seen, self._left = {id(owner) for owner in owners}, _MOST
        for owner in owners:
            for part in owner.modules() if isinstance(owner, nn.Module) else [owner]:
                self._seen.add(id(part))
                self._look_into(vars(part), _DEEP)

    def restore(self) -> None:
        """Put all of it back."""
        for held, saved in self._held:
            refill(held, saved)
        for tensor, values, version in self._tensors:
            put_back(tensor, values, version)
        for generator, state in self._generators:
            set_state(generator, state)
        for module in self._modules:
            module.restore()

    def _look_into(self, held: Any, depth: int) -> None:
        """Keep what is in a container, or among the attributes of an object."""
        if not isinstance(held, tuple):
            self._held.append((held, contents_of(held)))
        if len(held) > _LONG:
            return
        for key, value in list(items_of(held)):
            if key not in _OF_ALL_MODULES:
                self._look_at(value, depth - 1)
                copied = _copied(value) if isinstance(held, dict | list) else None
                if copied is not None:
                    held[key] = copied

    def _look_at(self, value: Any, depth: int) -> None:
        if type(value) in _PLAIN or id(value) in self._seen or not depth or not self._left:
            return
        self._seen.add(id(value))
        self._left -= 1
        if is_generator(value):
            self._generators.append((value, state_of(value)))
        elif isinstance(value, Tensor):
            self._keep_values(value)
        elif is_array(value):
            self._held.append((value, value.copy()))
        elif isinstance(value, nn.Module):
            self._modules.append(ModuleState(value))
            for part in value.modules():
                self._seen.add(id(part))
                self._look_into(vars(part), depth)
        elif not isinstance(value, Dataset | Callback) and (held := filled_by(value)) is not None:
            self._look_into(held, depth)

    def _keep_values(self, tensor: Tensor) -> None:
        is_here = not (tensor.is_meta or is_placeholder(tensor) or tensor.is_inference())
        if is_here and tensor.layout is torch.strided and tensor.numel() <= _SMALL:
            self._tensors.append((tensor, tensor.detach().clone(), version_of(tensor)))


def _copied(value: Any) -> Any:
    """A copy of an iterator; None of what is none, or cannot be copied, as the call of a generator cannot."""
    if not hasattr(type(value), "__next__") or hasattr(value, "__dict__"):
        return None
    try:
        return copy.copy(value)
    except Exception:  # whatever its class does
        return None
