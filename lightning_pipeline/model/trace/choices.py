"""What the choice of units may depend on beside shapes: the index of the batch, numbers in it, attributes."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, str)
_COMPARED = (
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__ __mod__ __rmod__ __floordiv__ __add__ __radd__ "
    "__sub__ __rsub__ __mul__ __rmul__ __and__ __rand__"
)


class NotedIndex(int):
    """The index of a batch, in a trace: notes whether code computes with it, which may choose a way."""

    noted: list[bool]

    @classmethod
    def of(cls, args: Sequence[Any]) -> "NotedIndex | None":
        """For the second argument of a step; None where that is no index."""
        if len(args) < 2 or type(args[1]) is not int:
            return None
        index = cls(args[1])
        index.noted = []
        return index

    __hash__ = int.__hash__


def _noting(name: str) -> Any:
    def compared(self: NotedIndex, *others: Any) -> Any:
        self.noted.append(True)
        return getattr(int, name)(self, *others)

    compared.__name__ = name
    return compared


for _name in _COMPARED.split():
    setattr(NotedIndex, _name, _noting(_name))


def with_noted_index(args: tuple[Any, ...], index: NotedIndex | None) -> tuple[Any, ...]:
    """Arguments of a step with an index that notes what is done with it."""
    return args if index is None else (args[0], index, *args[2:])


def plain_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Numbers and strings of a micro-batch, without the index of the batch."""
    found: list[Hashable] = []
    _add_plain((args[:1], args[2:], dict(kwargs)), found)
    return tuple(found)


def _add_plain(value: Any, found: list[Hashable]) -> None:
    if isinstance(value, str | int | float):
        found.append(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _add_plain(item, found)
    elif isinstance(value, list | tuple) and len(value) <= 1000:
        for item in value:
            _add_plain(item, found)


def plain_state(root: nn.Module, modules: Iterable[nn.Module], left_out: set[tuple[int, Any]]) -> Hashable:
    """Flags, whole numbers and strings that code between units may choose by, and the epoch.

    Args:
        root: The LightningModule.
        modules: Those whose attributes it may read.
        left_out: What the step itself changes: which `vars`, by its id, and the name.
    """
    found: list[Hashable] = [getattr(root, "current_epoch", 0)]
    for module in modules:
        held = vars(module)
        own = id(held)
        found += [
            (name, value)
            for name, value in held.items()
            if type(value) in _PLAIN and (own, name) not in left_out
        ]
    return tuple(found)


def is_tensor_read(func: Any) -> bool:
    """Whether a function gives Python what is in a tensor, past the operations."""
    return func in _READS


_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
