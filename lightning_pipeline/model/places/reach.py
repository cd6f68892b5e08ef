"""What the forward of a unit, and hooks inside it, may set or fill: what stood there, and what has changed.

A unit that is called by message runs on one rank. All ranks have the same module, and so reach the same
attributes, containers and objects by the same paths: what has changed on that rank can be done on the others.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.places.owners import MISSING, Guard
from lightning_pipeline.model.random import is_generator, set_state, state_of
from lightning_pipeline.model.tensors import (
    attributes_of,
    closed_over,
    is_array,
    is_placeholder,
    items_of,
    version_of,
)

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_NUMBERS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_DEEP, _FEW = 8, 100  # containers in containers, and items of one that is looked into
_LONG = 1000  # items of one of which no more is known than how many they are, such as a replay buffer
Path = tuple[Any, ...]
Stood = tuple[Path, Any]


class Changes(NamedTuple):
    """What a call did to what is in reach.

    Attributes:
        set: Entries that are others now, by the path of what they are in, and by key.
        removed: Keys that are no more.
        filled: All that is in a list, deque or set that is not as it was.
        added: What a long list has more than before, and how many items it had.
        written: Tensors that stood there, and that have other values.
        valued: Generators and arrays that stood there, and have other values, with these.
    """

    set: dict[Path, dict[Any, Any]]
    removed: dict[Path, list[Any]]
    filled: dict[Path, list[Any]]
    added: dict[Path, tuple[int, list[Any]]]
    written: dict[Stood, Tensor]
    valued: dict[Stood, bytes]

    def __bool__(self) -> bool:
        return any(self)

    def mapped(self, change: Callable[[Any], Any]) -> "Changes":
        """With others in the place of new entries and items."""
        entries = {path: {key: change(one) for key, one in new.items()} for path, new in self.set.items()}
        items = {path: [change(one) for one in new] for path, new in self.filled.items()}
        added = {path: (old, [change(one) for one in new]) for path, (old, new) in self.added.items()}
        return self._replace(set=entries, filled=items, added=added)


class Reach:
    """What a unit's forward may change, as it stands now.

    Args:
        root: The LightningModule, to whose attributes hooks inside of units write.
        unit: The module that is called.
        functions: That it is given.
        but: Names of attributes of the root that are not looked at.
    """

    def __init__(
        self,
        root: nn.Module,
        unit: nn.Module,
        functions: Iterable[Any] = (),
        but: frozenset[str] = frozenset(),
    ) -> None:
        self._nodes: dict[Path, Any] = {}
        self._entries: dict[Path, dict[Any, Any]] = {}
        self._lengths: dict[Path, int] = {}
        self._places: dict[int, Stood] = {}
        self._versions: list[tuple[Stood, Tensor, int]] = []
        self._valued: list[tuple[Stood, Any, bytes]] = []
        self._seen = set[int]()
        self._note(("module",), _Attributes(vars(root), _OF_ALL_MODULES | but), _DEEP)
        for number, module in enumerate(unit.modules()):
            self._note((number,), _Attributes(vars(module), _OF_ALL_MODULES), _DEEP)
            for path, value in _in_hooks(module):
                self._look((number, *path), value, _DEEP)
        for number, function in enumerate(functions):
            for place, value in enumerate(_held_by(function)):
                self._look(("function", number, place), value, _DEEP)

    def _look(self, path: Path, value: Any, depth: int) -> None:
        if type(value) in _NUMBERS or isinstance(value, Tensor | nn.Module | Guard):
            return
        if isinstance(value, tuple):
            if depth and len(value) <= _FEW:
                for key, item in enumerate(value):
                    self._look((*path, key), item, depth - 1)
            return
        held = value if isinstance(value, list | dict | deque | set) else attributes_of(value)
        if held is not None:
            self._note(path, held, depth)

    def _note(self, path: Path, node: Any, depth: int) -> None:
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        self._nodes[path] = node
        if len(node) > _LONG:
            self._lengths[path] = len(node)
            return
        self._entries[path] = entries = _entries(node)
        if isinstance(node, set):
            return
        for key, value in entries.items():
            if type(value) in _NUMBERS:
                continue
            self._places.setdefault(id(value), (path, key))
            if isinstance(value, Tensor) and not is_placeholder(value):
                self._versions.append(((path, key), value, version_of(value)))
            elif has_values(value):
                self._valued.append(((path, key), value, values_of(value)))
            elif depth and len(entries) <= _FEW:
                self._look((*path, key), value, depth - 1)

    def place(self, value: Any) -> Stood | None:
        """Where an object stood; None where it did not."""
        return self._places.get(id(value))

    def stood(self, place: Stood) -> Any:
        """What stood at a place on this rank, when it was looked at.

        Raises:
            SplitError: Nothing did.
        """
        found = self.known(place)
        if found is MISSING:
            path, key = place
            raise SplitError(
                f"a unit of another rank has changed {'.'.join(map(str, (*path, key)))}, which is not there "
                "on this one: ranks must hold the same containers"
            )
        return found

    def known(self, place: Stood) -> Any:
        """The same; `MISSING` where nothing stood there."""
        path, key = place
        return self._entries.get(path, {}).get(key, MISSING)

    def changes(self) -> Changes:
        """What is not as it stood."""
        found = Changes({}, {}, {}, {}, {}, {})
        for path, length in self._lengths.items():
            new = list(islice(items_of(self._nodes[path]), length, None))
            if new and isinstance(self._nodes[path], dict):
                found.set[path] = dict(new)
            elif new:
                found.added[path] = length, [item for _, item in new]
        for path, entries in self._entries.items():
            node = self._nodes[path]
            held = _entries(node)
            others = {key: value for key, value in held.items() if entries.get(key, MISSING) is not value}
            gone = [key for key in entries if key not in held]
            if isinstance(node, Mapping) and others:
                found.set[path] = others
            if isinstance(node, Mapping) and gone:
                found.removed[path] = gone
            if not isinstance(node, Mapping) and (others or gone):
                found.filled[path] = list(node)
        found.written.update(
            {place: tensor.detach().clone() for place, tensor, version in self._versions
             if version_of(tensor) != version}
        )  # fmt: skip
        now = ((place, values_of(one), before) for place, one, before in self._valued)
        found.valued.update({place: values for place, values, before in now if values != before})
        return found

    def do(self, changes: Changes, *, here: bool) -> None:
        """Do what a call did.

        Args:
            changes: With what stood here in the place of what stood there; a `Guard` if it did not come.
            here: Whether the call ran on this rank: it has written its tensors, and has what did not come.
        """
        for path, keys in changes.removed.items():
            for key in keys:
                self._node(path).pop(key, None)
        for path, entries in changes.set.items():
            came = {key: one for key, one in entries.items() if not (here and isinstance(one, Guard))}
            self._node(path).update(came)
        for path, items in changes.filled.items():
            node = self._node(path)
            if here and any(isinstance(one, Guard) for one in items):
                continue
            node.clear()
            node.update(items) if isinstance(node, set) else node.extend(items)
        for path, (length, items) in changes.added.items():
            node = self._node(path)
            while here and len(node) > length:
                node.pop()
            node.update(items) if isinstance(node, set) else node.extend(items)
        for place, values in changes.written.items() if not here else ():
            with torch.no_grad():
                self.stood(place).copy_(values)
        for place, held in changes.valued.items() if not here else ():
            give_values(self.stood(place), held)

    def _node(self, path: Path) -> Any:
        if path not in self._nodes:
            self.stood((path[:-1], path[-1]))
            raise SplitError(f"{'.'.join(map(str, path))} is another kind of object on this rank")
        node = self._nodes[path]
        return node.of if isinstance(node, _Attributes) else node


def has_values(value: Any) -> bool:
    """Whether it is an array or a generator of random numbers, which code may change in place."""
    return is_array(value) or is_generator(value)


def values_of(value: Any) -> bytes:
    """Those of an array, or where a generator stands."""
    return pickle.dumps(state_of(value)) if is_generator(value) else value.tobytes()


def give_values(value: Any, values: bytes) -> None:
    """Let an array or a generator have others."""
    if is_generator(value):
        set_state(value, pickle.loads(values))
    else:
        value[...] = numpy.frombuffer(values, value.dtype).reshape(value.shape)


class _Attributes(Mapping[str, Any]):
    """A module's own attributes, without those that every module has."""

    def __init__(self, of: dict[str, Any], but: frozenset[str]) -> None:
        self.of, self._but = of, but

    def __getitem__(self, name: str) -> Any:
        return self.of[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.of if name not in self._but)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _entries(node: Any) -> dict[Any, Any]:
    return {key: node[key] for key in node} if isinstance(node, _Attributes) else dict(items_of(node))


def _in_hooks(module: nn.Module) -> Iterator[tuple[Path, Any]]:
    """What hooks of a module have from where they were made."""
    for name in _HOOKS:
        for number, hook in enumerate(getattr(module, name).values()):
            for place, value in enumerate(_held_by(hook)):
                yield (name, number, place), value


def _held_by(function: Any) -> Iterator[Any]:
    if isinstance(function, partial):
        yield from (function.args, function.keywords)
        yield from _held_by(function.func)
    elif isinstance(function, MethodType):
        yield function.__self__
    elif isinstance(function, FunctionType):
        yield function.__defaults__
        yield function.__kwdefaults__
        yield from closed_over(function)
    else:
        yield function
