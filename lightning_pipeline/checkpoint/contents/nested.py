"""Values in containers as flat entries, which DCP would take apart without a way back."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_MARK = "#"


def flattened(values: Mapping[Any, Any]) -> dict[str, Any]:
    """A mapping as entries of plain values and tensors, with keys that are strings without dots.

    Containers that hold tensors, dictionaries, and values with other keys become one entry `#`, the JSON of
    their structure, and entries `#0`, `#1`, ... for the tensors in them.

    Args:
        values: Such as an optimizer keeps for a parameter.

    Raises:
        TypeError: A container holds something that has no JSON.

    Example:
        >>> flattened({"step": 3, "pair": {1: (2.0, None)}})
        {'step': 3, '#': '{"d": [["pair", {"d": [[1, {"t": [2.0, null]}]]}]]}'}
    """
    flat = {key: value for key, value in values.items() if _is_plain_key(key) and _is_plain(value)}
    rest = {key: value for key, value in values.items() if key not in flat}
    if rest:
        tensors: list[Tensor] = []
        flat[_MARK] = json.dumps(_encoded(rest, tensors))
        flat.update({f"{_MARK}{number}": tensor for number, tensor in enumerate(tensors)})
    return flat


def restored(flat: Mapping[str, Any]) -> dict[Any, Any]:
    """What `flattened` was given; the keys may come in another order.

    Args:
        flat: Its entries.
    """
    values: dict[Any, Any] = {key: value for key, value in flat.items() if not key.startswith(_MARK)}
    if _MARK in flat:
        values.update(_decoded(json.loads(flat[_MARK]), flat))
    return values


def _is_plain_key(key: Any) -> bool:
    return isinstance(key, str) and "." not in key and not key.startswith(_MARK)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(not isinstance(item, Tensor) and _is_plain(item) for item in value)
    return not isinstance(value, Mapping | list | tuple)


def _encoded(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_MARK: len(tensors) - 1}
    if type(value) is dict:
        return {"d": [[_encoded(key, tensors), _encoded(item, tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__[0]: [_encoded(item, tensors) for item in value]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__} in a container")


def _decoded(value: Any, flat: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _MARK:
        return flat[f"{_MARK}{content}"]
    if kind == "d":
        return {_decoded(key, flat): _decoded(item, flat) for key, item in content}
    items = [_decoded(item, flat) for item in content]
    return tuple(items) if kind == "t" else items
