"""What hooks that a batch goes through on its way to the device may reach: as it stands, to be put back."""

import copy
from collections import deque
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipeline.model.random import is_generator, set_state, state_of
from lightning_pipeline.model.tensors import ModuleState, is_placeholder, put_back, version_of

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_APART = (Trainer, Callback, DataLoader, Dataset, ModuleType, FunctionType, MethodType, type)
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_DEEP, _MOST, _LONG = 6, 20_000, 1000  # levels and objects that are looked into, and the longest container
_SMALL = 1 << 16  # elements of a tensor


class HookState:
    """Generators, iterators, tensors, dictionaries and objects below a module or data module.

    What holds the data is not looked into: hooks are given a batch of it. An iterator that can be copied
    has a copy in its place until `restore`.

    Args:
        owners: The LightningModule, of which everything else is kept elsewhere, and a data module.
    """

    def __init__(self, *owners: Any) -> None:
        self._generators: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        self._held: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._modules: list[ModuleState] = []
        self._seen, self._left = {id(owner) for owner in owners}, _MOST
        for owner in owners:
            modules = owner.modules() if isinstance(owner, nn.Module) else [owner]
            for module in modules:
                self._seen.add(id(module))
                self._look(vars(module), _DEEP)

    def restore(self) -> None:
        """Put all of it back."""
        for held, saved in self._held:
            dict.clear(held)
            dict.update(held, saved)
        for tensor, values, version in self._tensors:
            put_back(tensor, values, version)
        for generator, state in self._generators:
            set_state(generator, state)
        for module in self._modules:
            module.restore()

    def _look(self, held: dict[Any, Any], depth: int) -> None:
        """Keep what stands in a dictionary."""
        self._held.append((held, dict(held)))
        for key, value in list(held.items()) if len(held) <= _LONG else ():
            if key not in _OF_ALL_MODULES:
                self._look_at(value, depth)
                copied = _copied(value)
                if copied is not None:
                    held[key] = copied

    def _look_at(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN or id(value) in self._seen or not depth or not self._left:
            return
        self._seen.add(id(value))
        self._left -= 1
        if is_generator(value):
            self._generators.append((value, state_of(value)))
        elif isinstance(value, Tensor):
            is_here = not (value.is_meta or is_placeholder(value) or value.is_inference())
            if is_here and value.layout is torch.strided and value.numel() <= _SMALL:
                self._tensors.append((value, value.detach().clone(), version_of(value)))
        elif isinstance(value, nn.Module):
            self._modules.append(ModuleState(value))
            for part in value.modules():
                self._seen.add(id(part))
                self._look(vars(part), depth - 1)
        elif isinstance(value, dict):
            self._look(value, depth - 1)
        else:
            for item in _items(value):
                self._look_at(item, depth - 1)
            own = None if isinstance(value, _APART) else getattr(value, "__dict__", None)
            if isinstance(own, dict):
                self._look(own, depth - 1)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set | deque) and len(value) <= _LONG:
        yield from value


def _copied(value: Any) -> Any:
    """A copy of an iterator; None of what is none, or cannot be copied as a generator cannot."""
    if not hasattr(type(value), "__next__") or hasattr(value, "__dict__"):
        return None
    try:
        return copy.copy(value)
    except TypeError:
        return None
