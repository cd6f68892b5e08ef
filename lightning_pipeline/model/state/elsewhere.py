"""What stands on a stage for something that only another stage has."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lightning_pipeline._torch import tree_leaves
from lightning_pipeline.errors import PlaceholderError
from lightning_pipeline.model.places import Guard, Place
from lightning_pipeline.model.tensors import user_line


class ElsewhereError(PlaceholderError):
    """Something was read that is on the last stage only."""


def _refuse(what: str) -> NoReturn:
    raise ElsewhereError(
        f"{what} is filled by the end of the step, which runs on the last stage only: read it there "
        "(`self.trainer.is_global_zero` is true on it), or use self.log, whose values are on every rank "
        f"[at {user_line()}]"
    )


def _reader(name: str) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._refused()

    read.__name__ = name
    return read


def _silent(self: Any, *args: Any, **kwargs: Any) -> None:
    """Writes are dropped: the value lives on the last stage."""


_READS = [
    "__iter__",
    "__len__",
    "__getitem__",
    "__contains__",
    "__bool__",
    "__reversed__",
    "__eq__",
    "__ne__",
    "__lt__",
    "__gt__",
    "__add__",
    "__mul__",
    "index",
    "count",
    "copy",
    "get",
    "keys",
    "values",
    "items",
]
_WRITES = [
    "append",
    "extend",
    "insert",
    "remove",
    "clear",
    "sort",
    "reverse",
    "__setitem__",
    "__delitem__",
    "update",
    "appendleft",
    "extendleft",
]


class Elsewhere(Guard):
    """Raises on any use, also by torch's functions."""

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._refused()

    def _refused(self) -> NoReturn:
        _refuse(self._what)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        found: list[Any] = [leaf for leaf in leaves if isinstance(leaf, Guard)]
        return found[0]._refused() if found else _refuse("a value")

    def __repr__(self) -> str:
        return f"<{self._what}: on the last stage>"

    __hash__ = None  # type: ignore[assignment]


class Unmerged(Elsewhere):
    """Raises on any use of what the micro-batches of a batch set, and which has no value for the batch."""

    def __init__(self, what: str, step: str) -> None:
        super().__init__(what)
        object.__setattr__(self, "_step", step)

    __hash__ = object.__hash__  # type: ignore[assignment]  # torch looks for buffers among those it has seen

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refused()

    def _refused(self) -> NoReturn:
        raise PlaceholderError(
            f"{self._what} is set by {self._step}, which runs once for each micro-batch, and the values "
            "cannot be merged to what one device would have: append them to a list, use self.log, override "
            "`merge_outputs(outputs, sizes)` on the LightningModule, or, where a batch goes on from what the "
            "samples before have left, use num_microbatches=1, or whole_steps=True, which is slower "
            f"[at {user_line()}]"
        )


for _name in (*_READS, "__float__", "__int__", "__sub__", "__truediv__", "__radd__", "__rmul__", "__call__"):
    setattr(Elsewhere, _name, _reader(_name))


class _ContainerElsewhere(Guard):
    """Base of lists and their like."""

    _what: str
    _before: Any = ()

    def stand_for(self, before: Any) -> Any:
        """What this rank had, of which the containers inside take writes, too; returns the guard."""
        self._before = before
        return self

    def _inside(self, found: Any) -> Any:
        """What stands for a container in this one."""
        if isinstance(found, Guard):
            return found
        kind = next((kind for plain, kind in _KINDS.items() if isinstance(found, plain)), None)
        return self._refused() if kind is None else kind(self._what).stand_for(found)

    def __repr__(self) -> str:
        return f"<{self._what}: on the last stage>"

    def _refused(self) -> NoReturn:
        _refuse(self._what)


class ElsewhereList(_ContainerElsewhere, list[Any]):
    """A list that takes writes and drops them, and raises when read."""

    def __init__(self, what: str) -> None:
        super().__init__([Elsewhere(what)])  # torch.stack reads a list's memory, not its methods
        self._what = what


class ElsewhereDeque(_ContainerElsewhere, deque[Any]):
    """A deque that takes writes and drops them, and raises when read."""

    def __init__(self, what: str) -> None:
        super().__init__([Elsewhere(what)])
        self._what = what


class ElsewhereDict(_ContainerElsewhere, dict[Any, Any]):
    """A dictionary that takes writes and drops them, and raises when read."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what


_KINDS: dict[type, Callable[[str], Any]] = {list: ElsewhereList, deque: ElsewhereDeque, dict: ElsewhereDict}


def _item(self: Any, key: Any) -> Any:
    """A container that was in a list, which takes writes (`self.outputs[0].append(...)`)."""
    before = self._before
    inside = isinstance(key, int) and -len(before) <= key < len(before)
    return self._inside(before[key] if inside else None)


def _entry(self: Any, key: Any, default: Any = None) -> Any:
    """The same of a dictionary, or what it makes of a key that it has not."""
    before, makes = self._before, getattr(self._before, "default_factory", None)
    return self._inside(before[key] if key in before else default if makes is None else makes())


for _cls in (ElsewhereList, ElsewhereDeque, ElsewhereDict):
    for _name in _READS:
        setattr(_cls, _name, _reader(_name))
    for _name in _WRITES:
        setattr(_cls, _name, _silent)
    _cls.__getitem__ = _entry if _cls is ElsewhereDict else _item  # type: ignore[method-assign]
ElsewhereDict.setdefault = _entry  # type: ignore[method-assign]


def _refuse_unit(what: str) -> NoReturn:
    raise PlaceholderError(
        f"{what} is set by a unit's forward on another stage and read outside it, where it has "
        f"an old value: return it from forward instead [at {user_line()}]"
    )


class SetByUnit(Elsewhere):
    """Raises on any use of an attribute that the forward of a unit sets, on a stage that does not hold it."""

    def _refused(self) -> NoReturn:
        _refuse_unit(self._what)


class Unsent(Elsewhere):
    """Raises on any use of what a unit of another rank has made, and what cannot be sent from there."""

    def _refused(self) -> NoReturn:
        raise ElsewhereError(
            f"{self._what} has made something that cannot be pickled, and so is on its rank alone: let "
            f"it make tensors, numbers and containers of them [at {user_line()}]"
        )


class _OfUnit:
    """What a unit of another stage keeps."""

    _what: str

    def _refused(self) -> NoReturn:
        _refuse_unit(self._what)


class _ListOfUnit(_OfUnit, ElsewhereList):
    """The same of a list that it fills: writes are dropped."""


class _DequeOfUnit(_OfUnit, ElsewhereDeque):
    """The same of a deque."""


class _DictOfUnit(_OfUnit, ElsewhereDict):
    """The same of a dictionary."""


def set_by_unit(value: Any) -> Callable[[str], Any]:
    """What makes a guard for what a unit of another stage has in a place.

    Args:
        value: What stands there on this rank.
    """
    kinds = {list: _ListOfUnit, deque: _DequeOfUnit, dict: _DictOfUnit}
    return next((kind for plain, kind in kinds.items() if isinstance(value, plain)), SetByUnit)


def attribute_name(place: Place) -> str:
    """What to call an attribute of a module, or of a plain object that a module holds."""
    own = "." not in place.label
    return f"attribute {place.label!r}" + (" of the LightningModule" if own else "")


class AttributeGuards:
    """Puts guards in the place of attributes that only another stage has, and takes them away."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, Any], tuple[Place, Any, Callable[[str], Any] | None]] = {}

    def install(self, places: Iterable[Place], kind: Callable[[str], Any] | None = None) -> None:
        """Guard these; one that was assigned anew since is guarded again.

        Args:
            places: What to guard.
            kind: Of guard; None takes one that is a list for a list and so on.
        """
        for place in places:
            value = place.get()
            if isinstance(value, Guard):
                continue
            self._before.setdefault(place.identity, (place, value, kind))
            found = kind or next((_KINDS[plain] for plain in _KINDS if isinstance(value, plain)), Elsewhere)
            guard = found(attribute_name(place))
            place.put(guard.stand_for(value) if isinstance(guard, _ContainerElsewhere) else guard)

    def forget(self, places: Iterable[Place]) -> None:
        """These have a value of their own now, and are guarded no more."""
        for place in places:
            self._before.pop(place.identity, None)

    def release(self, places: Iterable[Place]) -> None:
        """Put back what was there, where a guard stands."""
        for place in places:
            if place.identity in self._before and isinstance(place.get(), Guard):
                place.put(self._before.pop(place.identity)[1])

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the guards away for a moment, for a trace that looks at every attribute."""
        guarded = [(place, kind) for place, _, kind in self._before.values()]
        self.remove()
        try:
            yield
        finally:
            for place, kind in guarded:
                self.install([place], kind)

    def remove(self) -> None:
        """Put back what was there."""
        for place, value, _ in self._before.values():
            place.put(value)
        self._before.clear()
