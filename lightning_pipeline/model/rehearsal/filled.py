"""Containers that a step fills with what units made, which ranks do not have alike: does it read them?"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_pipeline.model.places import FILLED, Effect
from lightning_pipeline.model.state import CannotRepeatError

_READING = (
    "__getitem__", "__iter__", "__len__", "__contains__", "__reversed__", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "__add__", "__mul__", "__rmul__", "__or__", "__ror__", "__copy__",
    "copy", "count", "index", "pop", "popleft", "popitem", "remove", "reverse", "rotate", "sort",
    "get", "setdefault", "keys", "values", "items",
)  # fmt: skip


@contextmanager
def filled_alone(effects: Sequence[Effect]) -> Iterator[list[str]]:
    """Inside, such containers are empty on each rank, and reading one raises.

    Args:
        effects: Of the step.

    Returns:
        Labels of those that were read.
    """
    read = list[str]()
    with ExitStack() as stack:
        for effect in effects:
            place, value = effect.place, effect.place.get()
            if effect.from_units and effect.is_container and type(value) in FILLED:
                place.put(_unread(value, place.label, read))
                stack.callback(place.put, value)
        yield read


def _unread(value: Any, label: str, read: list[str]) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        read.append(label)
        raise CannotRepeatError(label)

    kind = type(value)
    reading = {name: refuse for name in _READING if hasattr(kind, name)}
    made: Any = type(kind.__name__, (kind,), reading)
    return made([], value.maxlen) if isinstance(value, deque) else made()
