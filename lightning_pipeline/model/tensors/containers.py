"""What a step may fill in place: lists, deques, dictionaries, sets, and objects of the user's own classes."""

import argparse
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

_PLAIN_OBJECTS = (types.SimpleNamespace, argparse.Namespace)
_NOT_THE_USERS = sys.stdlib_module_names | {
    "torch", "lightning", "lightning_pipeline", "lightning_fabric", "pytorch_lightning", "torchmetrics",
    "transformers", "tokenizers", "numpy",
}  # fmt: skip
Container = list[Any] | deque[Any] | dict[Any, Any] | set[Any]


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
    if isinstance(value, Tensor | nn.Module | type):
        return None
    if not are_the_users(type(value).__module__) and not isinstance(value, _PLAIN_OBJECTS):
        return None
    own = getattr(value, "__dict__", None)
    return own if type(own) is dict else None


def objects_below(holders: Iterable[object]) -> list[object]:
    """Such objects among the attributes of modules, and among theirs, each once."""
    found: dict[int, object] = {}
    pending = list(holders)
    while pending:
        for value in vars(pending.pop()).values():
            if attributes_of(value) is not None and id(value) not in found:
                found[id(value)] = value
                pending.append(value)
    return list(found.values())


def filled_by(value: Any) -> Container | tuple[Any, ...] | None:
    """The container that `value` is, or that its attributes are in; None where it holds nothing."""
    if isinstance(value, list | deque | dict | set | tuple):
        return value
    return attributes_of(value)


def items_of(container: Container | tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    """Keys, or positions, and what is there."""
    return dict.items(container) if isinstance(container, dict) else enumerate(container)


def contents_of(container: Container) -> Any:
    """A copy of what a container holds, as a plain list, dictionary or set."""
    if isinstance(container, dict):
        return dict(items_of(container))
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Any, saved: Any) -> None:
    """Give a container the contents that it had, past what its own class allows (an immutable dictionary)."""
    if isinstance(container, list):
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
