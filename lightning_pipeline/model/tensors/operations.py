"""What an operation is given, what it writes, and which of these tensors have no values."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lightning_pipeline._torch import FakeTensor

Operation = Any


def is_placeholder(tensor: Any) -> bool:
    """Whether this is a tensor without values."""
    return isinstance(tensor, FakeTensor)


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's memory, shared by all of its views."""
    return int(tensor.untyped_storage()._cdata)


_WRITES: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}


def written_tensors(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The operands that an operator writes in place, from its schema."""
    found = _WRITES.get(func)
    if found is None:
        arguments = getattr(func, "_schema", None)
        written = [
            (index, argument)
            for index, argument in enumerate(arguments.arguments if arguments is not None else ())
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        positions = tuple(index for index, argument in written if not argument.kwarg_only)
        found = _WRITES[func] = (positions, tuple(argument.name for _, argument in written))
    for index in found[0]:
        if index < len(args):
            yield from operands_of((args[index],))
    for name in found[1]:
        if name in kwargs:
            yield from operands_of((kwargs[name],))


def operands_of(args: Iterable[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, or its results: such a value is one, or has a list."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))
