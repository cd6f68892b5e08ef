"""A mapping of the user's own class with other values, as a micro-batch or a message needs one."""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

_ARRAYS = (Tensor, np.ndarray)


def with_values(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same class, its attributes included, with other values; the given one stays as it is.

    Args:
        mapping: Of any class: `UserDict`, one that cannot be written, one that keeps its values inside.
        items: The values, under the same keys.

    Returns:
        None where its class can be filled in none of the ways that are known; see `unfillable`.
    """
    before = dict(mapping)
    for make in (_written, _inside, _called):
        try:
            made = make(mapping, items)
            if _holds(made, items) and all(_reads(mapping, *pair) for pair in before.items()):
                return made
        except Exception:  # whatever a class raises that cannot be copied, written, or made this way
            continue
    return None


def of_class(cls: type, items: dict[Any, Any]) -> Any:
    """A mapping of a class where none is at hand, with values: what another rank has sent.

    Returns:
        None where the class takes no dictionary and has no `update`; see `unfillable`.
    """
    if dataclasses.is_dataclass(cls):  # Hugging Face's ModelOutput is a dictionary and a dataclass
        return cls(**items)
    if cls is dict:
        return items
    for make in (_updated, _made):
        try:
            made = make(cls, items)
            if _holds(made, items) or (
                make is _updated and issubclass(cls, dict)
            ):  # it may add keys of its own
                return made
        except Exception:  # as above
            continue
    return None


def unfillable(cls: type) -> str:
    """What to tell the user of such a class."""
    return (
        f"a {cls.__module__}.{cls.__qualname__} cannot be made with other values, as a micro-batch or "
        f"another stage needs it: let `{cls.__name__}({{...}})` take a dictionary, or use a plain one"
    )


def _updated(cls: Any, items: dict[Any, Any]) -> Any:
    made = cls()
    made.update(items)
    return made


def _made(cls: Any, items: dict[Any, Any]) -> Any:
    return cls(items)


def _written(mapping: Any, items: dict[Any, Any]) -> Any:
    """A copy that is written to, with containers of its own."""
    if not isinstance(mapping, MutableMapping):
        return None
    made = _copied(mapping)
    for key, item in items.items():
        made[key] = item
    return made


def _inside(mapping: Any, items: dict[Any, Any]) -> Any:
    """A copy whose attribute, the mapping that has its values, has others."""
    held = [name for name, value in _attributes(mapping).items() if _same(value, mapping)]
    if not held:
        return None
    made = _copied(mapping)
    for name in held:
        object.__setattr__(made, name, with_values(_attributes(mapping)[name], items))
    return made


def _called(mapping: Any, items: dict[Any, Any]) -> Any:
    return _made(type(mapping), items)


def _copied(mapping: Any) -> Any:
    made = copy.copy(mapping)
    for name, value in _attributes(mapping).items():
        if isinstance(value, MutableMapping) and _attributes(made).get(name) is value:
            object.__setattr__(made, name, copy.copy(value))
    return made


def _attributes(mapping: Any) -> dict[str, Any]:
    return dict(getattr(mapping, "__dict__", {}))


def _same(value: Any, mapping: Any) -> bool:
    return isinstance(value, Mapping) and value is not mapping and _holds(value, dict(mapping))


def _holds(mapping: Any, items: dict[Any, Any]) -> bool:
    """Whether it has these tensors under these keys, and no other keys; it may have changed other values."""
    if not isinstance(mapping, Mapping) or list(mapping) != list(items):
        return False
    return all(not isinstance(item, _ARRAYS) or _reads(mapping, key, item) for key, item in items.items())


def _reads(mapping: Any, key: Any, item: Any) -> bool:
    """Whether it has this very value under a key; if it makes a new object at each reading: one like it."""
    found = mapping[key]
    if found is item or mapping[key] is found:
        return found is item
    return type(found) is type(item) and getattr(found, "shape", None) == getattr(item, "shape", None)
