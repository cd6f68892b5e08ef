"""Take a nested output apart into tensors and a plain description, and put it together again.

What a unit returns may be a tensor, a tuple, a dictionary, a dataclass such as Hugging Face's
`ModelOutput`, or any nesting of these, with `None`, numbers and strings between. The tensors travel
between stages; the rest is described once and rebuilt on the other side.
"""

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from lightning_pipeline.data import of_class, unfillable, with_values
from lightning_pipeline.errors import ConfigurationError, PlaceholderError
from lightning_pipeline.model.tensors.user_code import user_line

Leaf = TypeVar("Leaf")
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, slice, type,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum,
)  # fmt: skip
_HOLD_NOTHING = frozenset({type(None), bool, int, float, str})
_EXACT = 1e-9
_MANY = 64  # items of a container, which are samples rather than arguments


class OpaqueError(PlaceholderError):
    """Something was asked of a value that does not leave its module."""


class Opaque:
    """Stands for a value that is neither tensor nor constant and so does not travel; raises on any use.

    Args:
        type_name: Of the value's class.
    """

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.type_name == other.type_name

    def __hash__(self) -> int:
        return hash(self.type_name)

    def __repr__(self) -> str:
        return f"<{self.type_name} of a module: it does not leave it>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self.refused()

    def refused(self, *_: Any) -> NoReturn:
        """Say what to do."""
        raise OpaqueError(
            f"a module returns a {self.type_name}, which is made of neither tensors, numbers nor texts and "
            "does not leave it: return what it is made of (tensors in a tuple, a dictionary or a dataclass), "
            "or keep the module that makes it and the one that uses it whole with "
            f"PipelineStrategy(units=['<name of a module around both>']) [at {user_line()}]"
        )

    __iter__ = __len__ = __getitem__ = __call__ = __bool__ = __float__ = __int__ = __array__ = refused
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refused


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


def are_unlike(whole: Structure, part: Structure, share: float) -> bool:
    """Whether a call gave other constants than were thought for the batch, or tensors where that has none.

    Lists of constants of two lengths, such as a text for each of their samples, are not compared.

    Args:
        whole: Of the batch.
        part: Of a micro-batch.
        share: Its samples over those of the batch: numbers may go by that.
    """
    if whole.kind != part.kind:
        return True
    if whole.kind == "sequence" and len(whole.children) != len(part.children):
        return any(_tensors_of(node) for node in (whole, part))
    if not whole.children or len(whole.children) != len(part.children):
        return not (_is_same(whole, part) or _goes_by_samples(whole, part, share))
    return any(are_unlike(*pair, share) for pair in zip(whole.children, part.children, strict=True))


def flags_of(structure: Structure) -> Hashable:
    """What of a call's arguments may choose what it gives: which are tensors, `None` or truths, by place."""
    if structure.kind == "constant":
        return structure.payload if structure.payload is None or type(structure.payload) is bool else "."
    of_samples = structure.payload is list and not _tensors_of(structure)
    if of_samples or len(structure.children) > _MANY:
        return structure.kind
    return structure.kind, *map(flags_of, structure.children)


def joined_structure(whole: Structure, parts: Sequence[Structure], sizes: Sequence[int]) -> Structure | None:
    """What a call gives a batch, of what it gave its micro-batches.

    Args:
        whole: What was thought of the batch: the kinds of what is there, how long lists are that have an item
            for each sample, and numbers that go by the samples.
        parts: Of the micro-batches.
        sizes: Samples of each.

    Returns:
        None where nobody knows.
    """
    joined = _joined(whole, parts, sizes)
    return None if joined is None or _tensors_of(joined) != _tensors_of(whole) else joined


def _joined(whole: Structure | None, parts: Sequence[Structure], sizes: Sequence[int]) -> Structure | None:
    first, kinds = parts[0], {part.kind for part in parts}
    if len(kinds) > 1:
        return None
    like = whole if whole is not None and whole.kind == first.kind else NOTHING
    by_sample = [len(part.children) for part in parts] == list(sizes) and len(like.children) == sum(sizes)
    if first.kind == "sequence" and by_sample and not _tensors_of(first):
        return first._replace(children=tuple(node for part in parts for node in part.children))
    if not first.children:
        return _joined_leaf(like, parts, sizes)
    if any(len(part.children) != len(first.children) or part.payload != first.payload for part in parts):
        return None
    same = len(like.children) == len(first.children)
    wholes: Sequence[Structure | None] = like.children if same else [None] * len(first.children)
    columns = zip(wholes, zip(*(part.children for part in parts), strict=True), strict=True)
    children = [_joined(node, column, sizes) for node, column in columns]
    made = [child for child in children if child is not None]
    return None if len(made) < len(children) else first._replace(children=tuple(made))


def _joined_leaf(whole: Structure, parts: Sequence[Structure], sizes: Sequence[int]) -> Structure | None:
    """Numbers that go by the samples are those thought of for the batch; what is alike is the batch's."""
    pairs = zip(parts, sizes, strict=True)
    if all(_goes_by_samples(whole, part, size / sum(sizes)) for part, size in pairs):
        return whole
    return parts[0] if all(_is_same(part, parts[0]) for part in parts) else None


def _goes_by_samples(whole: Structure, part: Structure, share: float) -> bool:
    """Whether numbers of a micro-batch are its share of the batch's, or the same: a count, a shape."""
    mine, theirs = part.payload, whole.payload
    if whole.kind != "constant" or type(mine) is not type(theirs) or isinstance(mine, bool):
        return False
    if isinstance(mine, int | float):
        return bool(abs(mine - theirs * share) <= _EXACT * abs(theirs))
    if not isinstance(mine, torch.Size) or len(mine) != len(theirs):
        return False
    return all(one in (other, other * share) for one, other in zip(mine, theirs, strict=True))


def _is_same(one: Structure, other: Structure) -> bool:
    """Of two without children."""
    mine, theirs = one.payload, other.payload
    if one.kind != other.kind or type(mine) is not type(theirs):
        return False
    is_nan: bool = mine != mine and theirs != theirs  # not equal to itself
    return is_nan or bool(mine == theirs)


def _tensors_of(structure: Structure) -> int:
    return structure.kind == "tensor" or sum(map(_tensors_of, structure.children))


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
        made = with_values(value, mapped)
        if made is None and all(mapped[key] is item for key, item in value.items()):
            return value
        return _filled(type(value), made)
    return value


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Rebuild `value` with `function` applied to each of its tensors; other objects are kept as they are."""
    return map_leaves(function, value, Tensor)
