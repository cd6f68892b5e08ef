"""What a first batch may change on its way, in loaders and hooks: as it stands, to be put back."""

import copy
import functools
import itertools
import sys
import zlib
from collections.abc import Sequence
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy import ndarray
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from lightning_pipeline.model.places import Replayed
from lightning_pipeline.model.random import is_generator, set_state, state_of
from lightning_pipeline.model.tensors import (
    ModuleState,
    are_the_users,
    closed_over,
    contents_of,
    filled_by,
    is_array,
    is_installed,
    is_placeholder,
    items_of,
    put_back,
    refill,
    version_of,
)

_ALONE: frozenset[type] = frozenset(
    {itertools.count, itertools.repeat, type(iter([])), type(iter(())), type(iter("")), type(iter(range(0)))}
)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_ALIVE = frozenset(
    {"asyncio", "concurrent", "io", "logging", "multiprocessing", "queue", "threading", "weakref"}
)
_STILL = frozenset({"torch", "lightning", "lightning_pipeline"})
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_DEEP, _MOST, _LONG = 8, 20_000, 1000  # levels and objects that are looked into, and the longest container
_SMALL = 1 << 16  # elements of a tensor
_MOST_BYTES = 1 << 28  # of all that is copied


class HookState:
    """Generators, iterators, tensors, arrays, containers and objects below a module or data module.

    What holds the data is not looked into, unless it is what is asked for: hooks are given a batch of it.
    Objects of libraries stand as they do, but for generators in them: a thread, a queue or a loader's
    iterator is more than its attributes. An iterator has a copy in its place until `restore`, or gives again
    what has been taken of it.

    Args:
        owners: The LightningModule, of which everything else is kept elsewhere, and a data module.
        of_data: Whether these are data sets, samplers and what collates. Then what their functions close
            over, and generators, containers and numbers that stand in their files, are looked at too.
    """

    def __init__(self, *owners: Any, of_data: bool = False) -> None:
        self._generators: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        self._held: list[tuple[Any, Any]] = []
        self._modules: list[ModuleState] = []
        self._iterators: list[tuple[Any, Any, Replayed]] = []
        self._large: list[tuple[ndarray[Any, Any], int]] = []
        self._numbers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._of_data, self._left, self._bytes = of_data, _MOST, _MOST_BYTES
        self._whole = True
        self._seen = set() if of_data else {id(owner) for owner in owners}
        for owner in owners:
            if of_data:
                self._look_at(owner, _DEEP)
                continue
            for part in owner.modules() if isinstance(owner, nn.Module) else [owner]:
                self._seen.add(id(part))
                self._look_into(vars(part), _DEEP)

    @property
    def is_whole(self) -> bool:
        """Whether everything was looked into that may change, and no object of a library is among it."""
        draws = any(iterator.has_given for *_, iterator in self._iterators)  # or may, where it goes on
        return self._whole and self._left > 0 and not draws and self.can_be_restored

    @property
    def can_be_restored(self) -> bool:
        """Whether no array has changed that is too large to be copied."""
        return all(_sum_of(array) == known for array, known in self._large)

    def leave(self) -> None:
        """Let all stand as it is now, as where a half of it could be put back; iterators go on from there."""
        for held, key, iterator in self._iterators:
            if held[key] is iterator:
                held[key] = iterator.rest()

    def restore(self) -> None:
        """Put all of it back; what is as it was is not written."""
        for held, saved in self._held:
            if _is_changed(held, saved):
                refill(held, saved)
        for held, key, iterator in self._iterators:
            iterator.at = 0
            held[key] = iterator.rest()
        for tensor, values, version in self._tensors:
            if version_of(tensor) != version:
                put_back(tensor, values, version)
        for generator, state in self._generators:
            set_state(generator, state)
        for module in self._modules:
            module.restore()
        for namespace, numbers in self._numbers:
            namespace.update({name: one for name, one in numbers.items() if namespace.get(name) is not one})

    def _look_into(self, held: Any, depth: int) -> None:
        """Keep what is in a container, or among the attributes of an object."""
        if not isinstance(held, tuple):
            self._held.append((held, contents_of(held)))
        if len(held) > _LONG:
            return
        for key, value in list(items_of(held)):
            if key in _OF_ALL_MODULES:
                continue
            if isinstance(held, dict | list) and _is_iterator(value):
                held[key] = self._standing_for(held, key, value)
            else:
                self._look_at(value, depth - 1)

    def _look_at(self, value: Any, depth: int) -> None:
        if type(value) in _PLAIN or id(value) in self._seen:
            return
        if not depth or not self._left:
            self._whole = False
            return
        self._seen.add(id(value))
        self._left -= 1
        if is_generator(value):
            self._generators.append((value, state_of(value)))
        elif isinstance(value, Tensor):
            self._keep_values(value)
        elif isinstance(value, ndarray):
            self._keep_array(value)
        elif isinstance(value, nn.Module):
            self._look_at_module(value, depth)
        elif self._of_data and self._look_at_code(value, depth):
            return
        elif not isinstance(value, Dataset | Callback) and (held := filled_by(value)) is not None:
            self._look_into(held, depth)
        elif self._of_data:
            self._whole = self._whole and _stands_still(value)
            self._look_for_generators(value, depth)

    def _look_at_module(self, value: nn.Module, depth: int) -> None:
        if self._of_data and isinstance(value, LightningModule):
            self._look_into(vars(value), depth)
            return
        self._modules.append(ModuleState(value))
        for part in value.modules():
            self._seen.add(id(part))
            self._look_into(vars(part), depth)

    def _look_at_code(self, value: Any, depth: int) -> bool:
        """Look behind a function, or into what holds data; whether it is one of these."""
        behind: Sequence[Any] = ()
        if isinstance(value, functools.partial):
            behind = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            behind = [value.__self__]
        elif isinstance(value, FunctionType):
            behind = [*closed_over(value), *(value.__defaults__ or ())]
            self._look_at_file(value.__module__)
        elif isinstance(value, Dataset | Sampler):
            self._look_into(vars(value), depth)
            self._look_at_file(type(value).__module__)
            behind = _closed_over_by(type(value))
        else:
            self._look_at_file(type(value).__module__)
            return isinstance(value, Trainer | ModuleType | type)
        for item in behind:
            self._look_at(item, depth - 1)
        return True

    def _look_at_file(self, name: str) -> None:
        """Keep generators, containers and numbers that stand in a file of the user's."""
        file = sys.modules.get(name)
        if file is None or id(file) in self._seen or not are_the_users(name) or is_installed(file):
            return
        self._seen.add(id(file))
        namespace = vars(file)
        own = {key: one for key, one in namespace.items() if not key.startswith("__")}
        self._numbers.append((namespace, {k: v for k, v in own.items() if type(v) in (bool, int, float)}))
        for value in own.values():
            if is_generator(value) or isinstance(value, Tensor | list | dict | set) or is_array(value):
                self._look_at(value, 2)

    def _look_for_generators(self, value: Any, depth: int) -> None:
        """In an object of a library, such as a transform, and in those that it holds."""
        own = getattr(value, "__dict__", None)
        if type(own) is not dict or len(own) > _LONG or type(value).__module__.partition(".")[0] in _ALIVE:
            return
        for held in list(own.values()):
            items = held if type(held) in (list, tuple) and len(held) <= _LONG else (held,)
            for item in items:
                if is_generator(item) or hasattr(item, "__dict__"):
                    self._look_at(item, depth - 1)

    def _standing_for(self, held: Any, key: Any, iterator: Any) -> Any:
        """A copy, where that goes on by itself; else what gives again what is taken of it until `restore`."""
        if type(iterator) in _ALONE:
            return copy.copy(iterator)
        replayed = Replayed(iterator)
        self._iterators.append((held, key, replayed))
        return replayed

    def _keep_array(self, array: "ndarray[Any, Any]") -> None:
        if is_array(array) and self._fits(array.nbytes):
            self._held.append((array, array.copy()))
        elif self._of_data and array.flags.writeable and array.dtype.kind != "O" and self._fits(array.nbytes):
            self._large.append((array, _sum_of(array)))

    def _fits(self, number: int) -> bool:
        """Whether so many bytes are copied, too: samples are many, and read only."""
        self._bytes -= number
        return self._bytes >= 0

    def _keep_values(self, tensor: Tensor) -> None:
        is_here = not (tensor.is_meta or is_placeholder(tensor) or tensor.is_inference())
        is_plain = is_here and tensor.layout is torch.strided and tensor.numel() <= _SMALL
        if is_plain and self._fits(tensor.numel() * tensor.element_size()):
            self._tensors.append((tensor, tensor.detach().clone(), version_of(tensor)))


def _closed_over_by(kind: type) -> list[Any]:
    """What methods of a class that stands in a function have of that, as of a module whose method that is."""
    own = [value for one in kind.__mro__ for value in vars(one).values()]
    methods = [value for value in own if isinstance(value, FunctionType)]
    return [value for method in methods for value in closed_over(method)]


def _stands_still(value: Any) -> bool:
    """Whether an object of a library holds nothing and gives nothing: no file, no cursor, no environment."""
    library = type(value).__module__.partition(".")[0].strip("_")
    moves = any(hasattr(value, name) for name in ("__next__", "read", "recv")) or library in _ALIVE
    return not moves and (library in _STILL or not hasattr(value, "__dict__"))


def _is_iterator(value: Any) -> bool:
    """Whether it only gives items: no file, no cursor, and no object that is looked into."""
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")


def _is_changed(held: Any, saved: Any) -> bool:
    """Whether a container or array is not as it was."""
    if isinstance(held, ndarray):
        return bool(held.tobytes() != saved.tobytes())
    if isinstance(held, set | frozenset):
        return bool(held != saved)
    now = contents_of(held)
    if len(now) != len(saved):
        return True
    if isinstance(saved, dict):
        return not all(map(is_, now, saved)) or not all(map(is_, now.values(), saved.values()))
    return not all(map(is_, now, saved))


def _sum_of(array: "ndarray[Any, Any]") -> int:
    """A sum of what is in a large array, which is compared and not copied."""
    return zlib.crc32(array.tobytes())
