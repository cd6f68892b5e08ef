"""What hooks that a batch goes through on its way to the device may reach: as it stands, to be put back."""

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipeline.model.random import is_generator, set_state, state_of
from lightning_pipeline.model.tensors import ModuleState, are_the_users, is_placeholder, put_back, version_of

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
            methods: Any = (
                OrderedDict if isinstance(held, OrderedDict) else dict
            )  # which has links of its own
            methods.clear(held)
            methods.update(held, saved)
        for tensor, values, version in self._tensors:
            put_back(tensor, values, version)
        for generator, state in self._generators:
            set_state(generator, state)
        for module in self._modules:
            module.restore()

    def _look(self, held: dict[Any, Any], depth: int) -> None:
        """Keep what stands in a dictionary."""
        if len(held) > _LONG:
            return
        self._held.append((held, dict(held)))
        for key, value in list(held.items()):
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
            self._look_into(value, depth - 1)

    def _look_into(self, value: Any, depth: int) -> None:
        """Keep what an object of another kind has, and the items of a container."""
        for item in _items(value):
            self._look_at(item, depth)
        kind = type(value)
        apart = isinstance(value, _APART) or hasattr(kind, "__next__")  # a loader's iterator has processes
        own = None if apart else getattr(value, "__dict__", None)
        if isinstance(own, dict) and are_the_users(kind.__module__):
            self._look(own, depth)
        elif isinstance(own, dict):  # of a library: a thread, a queue or a connection stands as it does
            self._generators += [(one, state_of(one)) for one in own.values() if is_generator(one)]


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set | deque) and len(value) <= _LONG:
        yield from value


def _copied(value: Any) -> Any:
    """A copy of an iterator; None of what is none, or cannot be copied as a generator cannot."""
    if not hasattr(type(value), "__next__") or hasattr(value, "__dict__"):
        return None
    try:
        return copy.copy(value)
    except Exception:  # whatever its class does
        return None
