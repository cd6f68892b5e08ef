"""What a step may fill in place: lists, deques, dictionaries, sets, and objects of the user's own classes."""

import argparse
import queue
import sys
import threading
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import ItemsView, Iterable, Mapping
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy
from torch import Tensor, nn

_PLAIN_OBJECTS = (
    types.SimpleNamespace,
    argparse.Namespace,
    UserDict,
    UserList,
    ChainMap,
    queue.Queue,
    threading.local,
)
_NOT_THE_USERS = sys.stdlib_module_names | {
    "torch", "lightning", "lightning_pipeline", "lightning_fabric", "pytorch_lightning", "torchmetrics",
    "transformers", "tokenizers", "numpy",
}  # fmt: skip
_NESTED, _FEW, _MOST = 8, 1000, 2000  # containers in containers, items of one, objects in all
_VISITED = 20_000  # values in all
_CONTAINERS = (list, deque, dict, set, tuple)
_NO_KEEPERS = (Tensor, nn.Module, type)
HAVE_NOTHING_INSIDE = frozenset(
    {bool, int, float, str, type(None), types.FunctionType, types.ModuleType, type}
)
"""Kinds of values that hold nothing which a step may fill."""
Container = list[Any] | deque[Any] | dict[Any, Any] | set[Any]
_KINDS = frozenset(map(numpy.dtype, (
    "bool", "uint8", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
)))  # fmt: skip
_LARGEST = 1 << 20  # bytes of an array that is copied to be compared


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array of numbers in which a step may count, such as a confusion matrix.

    A larger one is taken for data, and one that cannot be written for what it says.
    """
    return (
        isinstance(value, numpy.ndarray)
        and value.dtype in _KINDS
        and value.nbytes <= _LARGEST
        and value.flags.writeable
        and all(stride >= 0 for stride in value.strides)
    )


@cache
def are_the_users(module: str) -> bool:
    """Whether this Python module is none of a library's that we know.

    Args:
        module: Its dotted name.
    """
    return module.partition(".")[0] not in _NOT_THE_USERS or module == "__main__"


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that only keeps things, such as `self.store = Store()`.

    Args:
        value: Anything.

    Returns:
        Its own `__dict__`; None where it is no object of a class of the user's.
    """
    if isinstance(value, _NO_KEEPERS):
        return None
    if not are_the_users(type(value).__module__) and not isinstance(value, _PLAIN_OBJECTS):
        return None
    own = getattr(value, "__dict__", None)
    return own if type(own) is dict else None


def slots_of(value: object) -> tuple[str, ...]:
    """Names of the attributes that an object of a class of the user's keeps in slots.

    Args:
        value: Anything, such as an object of a `@dataclass(slots=True)`.
    """
    kind: Any = type(value)
    return _slots_of(kind)


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    if issubclass(kind, _NO_KEEPERS) or not are_the_users(kind.__module__):
        return ()
    own = [cls for cls in kind.__mro__ if are_the_users(cls.__module__)]
    return tuple(
        _mangled(cls, name)
        for cls in own
        for name in _listed(vars(cls).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    )


def _listed(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _mangled(cls: type, name: str) -> str:
    """As Python calls an attribute that is a class's own."""
    is_own = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if is_own else name


def in_slots(value: Any) -> dict[str, Any]:
    """What an object keeps in slots, by name."""
    return {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}


def objects_below(holders: Iterable[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, object]]:
    """Such objects among entries, in their containers, and among the attributes of objects found.

    Args:
        holders: Entries, each with what their paths begin with, such as `layers.0.`.

    Returns:
        Each object once, with its path.
    """
    found: dict[int, tuple[str, object]] = {}
    pending = deque(
        (f"{path}{key}", value, _NESTED) for path, entries in holders for key, value in entries.items()
    )
    left = _VISITED
    while pending and left and len(found) < _MOST:
        path, value, depth = pending.popleft()
        left -= 1
        if type(value) in HAVE_NOTHING_INSIDE:
            continue
        own: Mapping[Any, Any] | None = attributes_of(value)
        if slots_of(value):
            own = {**(own or {}), **in_slots(value)}
        if isinstance(value, partial):
            own = arguments_of(value)
        if own is not None:
            if id(value) not in found:
                found[id(value)] = path, value
                pending.extend((f"{path}.{key}", item, _NESTED) for key, item in own.items())
        elif depth and _is_plain_container(value) and len(value) <= _FEW:
            for place, (key, item) in enumerate(items_of(value)):
                name = key if isinstance(key, str | int) else place
                pending.append((f"{path}.{name}", item, depth - 1))
    return list(found.values())


def _is_plain_container(value: Any) -> bool:
    """Whether it is a container that may be looked into, and not what stands for one of another stage."""
    kind = type(value)
    return kind.__module__ in ("builtins", "collections") and issubclass(kind, dict | list | tuple | deque)


def arguments_of(made: "partial[Any]") -> dict[int | str, Any]:
    """What a `functools.partial` gives, by position or name."""
    return dict(chain(enumerate(made.args), made.keywords.items()))


class Slots:
    """The attributes of an object that keeps some in slots, as the entries of a dictionary.

    Args:
        thing: The object.
    """

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def items(self) -> ItemsView[str, Any]:
        """Those that are set."""
        return {**(attributes_of(self._thing) or {}), **in_slots(self._thing)}.items()

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._thing, name, value)

    def __len__(self) -> int:
        return len(self.items())

    def refill(self, saved: Mapping[str, Any]) -> None:
        """Let these be all that are set; those of a frozen data class too."""
        for name in [name for name, _ in self.items() if name not in saved]:
            object.__delattr__(self._thing, name)
        for name, value in saved.items():
            object.__setattr__(self._thing, name, value)


def filled_by(value: Any) -> Container | tuple[Any, ...] | Slots | None:
    """The container that `value` is, or that its attributes or arguments are in; None where there is none."""
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, partial):
        return tuple(arguments_of(value).values())
    return Slots(value) if slots_of(value) else attributes_of(value)


def items_of(container: Container | tuple[Any, ...] | Slots) -> Iterable[tuple[Any, Any]]:
    """Keys, or positions, and what is there."""
    if isinstance(container, Slots):
        return container.items()
    return dict.items(container) if isinstance(container, dict) else enumerate(container)


def dict_like(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary with these items, of the same kind as one of the standard library's."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, items)
    return type(value)(items) if type(value) in (OrderedDict, Counter) else items


def contents_of(container: Container | Slots) -> Any:
    """A copy of what a container holds, as a plain list, dictionary or set."""
    if isinstance(container, dict | Slots):
        return dict(items_of(container))
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Any, saved: Any) -> None:
    """Give a container the contents that it had, past what its own class allows (an immutable dictionary)."""
    if isinstance(container, numpy.ndarray):
        container[...] = saved
    elif isinstance(container, Slots):
        container.refill(saved)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), saved)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, saved)
    elif isinstance(container, dict):
        _refill_dict(container, saved)
    else:
        set.clear(container)
        set.update(container, saved)


def _refill_dict(container: dict[Any, Any], saved: dict[Any, Any]) -> None:
    if len(container) == len(saved) and all(
        mine is theirs and value is known
        for (mine, value), (theirs, known) in zip(items_of(container), items_of(saved), strict=True)
    ):
        return
    kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
    kind.clear(container)
    for key, value in items_of(saved):
        kind.__setitem__(container, key, value)
