"""Containers that a step fills with what units gave: for a run without units each rank has empty ones."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from lightning_pipeline.model.places.owners import FILLED, Effect

_READING = (
    "__getitem__", "__iter__", "__len__", "__contains__", "__reversed__", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "__add__", "__mul__", "__rmul__", "__or__", "__ror__", "__copy__",
    "copy", "count", "index", "pop", "popleft", "popitem", "remove", "reverse", "rotate", "sort",
    "get", "setdefault", "keys", "values", "items",
)  # fmt: skip


class _Form(NamedTuple):
    """What a container is.

    Attributes:
        kind: Its type.
        longest: Of a deque.
        inside: Containers in it, by key; of a list they are all that it has.
        makes: What a dictionary makes for a key that it does not have.
    """

    kind: type[Any]
    longest: int | None = None
    inside: "Mapping[Any, _Form]" = MappingProxyType({})
    makes: "_Form | None" = None

    @classmethod
    def of(cls, value: Any) -> "_Form":
        """That of a list, deque or dictionary."""
        kind, inside = type(value), dict[Any, _Form]()
        if isinstance(value, dict):
            inside = {key: cls.of(one) for key, one in value.items() if type(one) in FILLED}
        elif kind is list and all(type(one) in FILLED for one in value):
            inside = dict(enumerate(map(cls.of, value)))
        made = value.default_factory if isinstance(value, defaultdict) else None
        return cls(kind, getattr(value, "maxlen", None), inside, cls.of(made()) if made in FILLED else None)


class FilledContainers:
    """Those of a module's steps.

    Their forms are those of the first run, in which all ranks have the same: what a step has put there since
    the last stage alone may have.

    Args:
        refusal: Makes the error where one is read, of its label.
    """

    def __init__(self, refusal: Callable[[str], Exception]) -> None:
        self._refusal, self._forms = refusal, dict[str, _Form]()

    @contextmanager
    def alone(self, effects: Sequence[Effect]) -> Iterator[list[str]]:
        """Inside, such containers are empty on each rank, and reading what they are filled with raises.

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
                    if place.label not in self._forms:
                        self._forms[place.label] = _Form.of(value)

                    def refuse(*args: Any, label: str = place.label, **kwargs: Any) -> NoReturn:
                        read.append(label)
                        raise self._refusal(label)

                    place.put(_unread(self._forms[place.label], refuse))
                    stack.callback(place.put, value)
            yield read


def _unread(form: _Form, refuse: Callable[..., NoReturn]) -> Any:
    """An empty container of this form, or one with such containers inside."""
    inside = {key: _unread(one, refuse) for key, one in form.inside.items()}

    def found(_: Any, key: Any, default: Any = None) -> Any:
        if type(key) is not slice and key in inside:
            return inside[key]
        return refuse() if form.makes is None else inside.setdefault(key, _unread(form.makes, refuse))

    def at(_: Any, place: Any) -> Any:
        return found(_, place + len(inside) if type(place) is int and place < 0 else place)

    reading: dict[str, Any] = {name: refuse for name in _READING if hasattr(form.kind, name)}
    if issubclass(form.kind, dict):
        reading |= dict.fromkeys(("__getitem__", "setdefault", "get")[: 2 if form.makes else 3], found)
    elif inside:
        reading |= {
            "__getitem__": at, "__iter__": lambda _: iter(inside.values()), "__len__": lambda _: len(inside),
        }  # fmt: skip
    made: Any = type(form.kind.__name__, (form.kind,), reading)
    return made([], form.longest) if form.kind is deque else made()
