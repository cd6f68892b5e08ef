"""Take a nested output apart into tensors and a plain description, and put it together again.

What a unit returns may be a tensor, a tuple, a dictionary, a dataclass such as Hugging Face's
`ModelOutput`, or any nesting of these, with `None`, numbers and strings between. The tensors travel
between stages; the rest is described once and rebuilt on the other side.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_pipeline.data import of_class, unfillable, with_values
from lightning_pipeline.errors import ConfigurationError

Leaf = TypeVar("Leaf")
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, slice, type,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum,
)  # fmt: skip
_HOLD_NOTHING = frozenset({type(None), bool, int, float, str})


class Opaque(NamedTuple):
    """Stands for a value that is neither tensor nor constant and so does not travel."""

    type_name: str


class Structure(NamedTuple):
    """One node of a taken-apart value: how to rebuild it from its children.

    `kind` is "tensor" (`payload`: position among the tensors), "constant" (`payload`: the value), "given"
    (`payload`: place among the arguments; see `given.Given`) or a container (`payload`: its class and keys).
    """

    kind: str
    payload: Any
    children: tuple["Structure", ...] = ()


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Take `value` apart into its tensors, in a fixed order, and the structure that holds them."""
    tensors: list[Tensor] = []
    if isinstance(value, Tensor):  # the common case, kept short
        return [value], _LONE_TENSOR
    return tensors, describe(value, tensors)


def describe(value: Any, tensors: list[Tensor], given: Mapping[int, int] | None = None) -> Structure:
    """The structure of `value`; its tensors are appended.

    Args:
        value: Anything.
        tensors: Is added to.
        given: Places of what is known to whoever puts it together, by id. Constants never are.
    """
    if isinstance(value, _CONSTANTS):
        return Structure("constant", value)
    if given and id(value) in given:
        return Structure("given", given[id(value)])
    if isinstance(value, Tensor):
        return Structure("tensor", _position(value, tensors, once=given is not None))
    if isinstance(value, dict):
        children = tuple(describe(item, tensors, given) for item in value.values())
        return Structure("dict", (type(value), tuple(value)), children)
    if isinstance(value, list | tuple):
        children = tuple(describe(item, tensors, given) for item in value)
        return Structure("sequence", type(value), children)
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        children = tuple(describe(_held(value, name), tensors, given) for name in names)
        return Structure("dataclass", (type(value), names), children)
    if isinstance(value, Mapping):  # after the common classes: it takes longer to tell
        children = tuple(describe(item, tensors, given) for item in value.values())
        return Structure("dict", (type(value), tuple(value)), children)
    return Structure("constant", Opaque(f"{type(value).__module__}.{type(value).__qualname__}"))


def _position(tensor: Tensor, tensors: list[Tensor], *, once: bool) -> int:
    if once:
        for position, known in enumerate(tensors):
            if known is tensor:
                return position
    tensors.append(tensor)
    return len(tensors) - 1


def unflatten(tensors: list[Any], structure: Structure, given: Sequence[Any] = ()) -> Any:
    """Put a value together again from its tensors, or from what should stand in their places."""
    kind, payload, nodes = structure
    if kind == "tensor":
        return tensors[payload]
    if kind == "constant":
        return payload
    if kind == "given":
        return given[payload]
    children = [unflatten(tensors, node, given) for node in nodes]
    return _REBUILD[kind](payload, children)


def _rebuild_sequence(cls: type, children: list[Any]) -> Any:
    return cls(*children) if hasattr(cls, "_fields") else cls(children)


def _rebuild_dict(payload: tuple[type, tuple[Any, ...]], children: list[Any]) -> Any:
    cls, keys = payload
    if cls is dict:
        return dict(zip(keys, children, strict=True))
    return _filled(cls, of_class(cls, dict(zip(keys, children, strict=True))))


def _filled(cls: type, made: Any) -> Any:
    if made is None:
        raise ConfigurationError(unfillable(cls))
    return made


def _rebuild_dataclass(payload: tuple[type, tuple[str, ...]], children: list[Any]) -> Any:
    cls, names = payload
    made: Any = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(made, name, child)
    return made


NOTHING = Structure("constant", None)
_LONE_TENSOR = Structure("tensor", 0)
_REBUILD: dict[str, Callable[[Any, list[Any]], Any]] = {
    "sequence": _rebuild_sequence,
    "dict": _rebuild_dict,
    "dataclass": _rebuild_dataclass,
}


def leaves_in(value: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """Every object of a class inside lists, tuples, mappings and dataclasses of `value`, in order."""
    if isinstance(value, kind):
        yield value
    elif type(value) in _HOLD_NOTHING:
        return
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves_in(item, kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_in(_held(value, field.name, None), kind)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_in(item, kind)


def _held(value: Any, name: str, *default: Any) -> Any:
    """A field of a dataclass, also where its class refuses to say it, as some configurations do."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return getattr(value, name, *default)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside lists, tuples, mappings and dataclasses of `value`, in order."""
    return leaves_in(value, Tensor)


def map_leaves(function: Callable[[Leaf], Any], value: Any, kind: type[Leaf]) -> Any:
    """Rebuild `value` with `function` applied to each object of a class; others are kept as they are."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in _HOLD_NOTHING:
        return value
    if isinstance(value, dict):
        children = [map_leaves(function, item, kind) for item in value.values()]
        return _rebuild_dict((type(value), tuple(value)), children)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return _rebuild_sequence(type(value), [map_leaves(function, item, kind) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        children = [map_leaves(function, _held(value, name), kind) for name in names]
        return _rebuild_dataclass((type(value), names), children)
    if isinstance(value, Mapping):
        mapped = {key: map_leaves(function, item, kind) for key, item in value.items()}
        same = all(mapped[key] is item for key, item in value.items())
        return value if same else _filled(type(value), with_values(value, mapped))
    return value


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Rebuild `value` with `function` applied to each of its tensors; other objects are kept as they are."""
    return map_leaves(function, value, Tensor)
