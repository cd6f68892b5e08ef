"""What a step may change that is no part of the module: data module, optimizers, globals, iterators."""

import inspect
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_pipeline.model.places import Owner, Standing
from lightning_pipeline.model.tensors import (
    ModuleState,
    WritesUndone,
    attributes_of,
    contents_of,
    filled_by,
    is_array,
    items_of,
    refill,
)

_DEPTH = 4
_MOST = 100  # items of a container that are looked into: a data set is none of a step's
_MOST_SEEN = 20_000
_HOLDS_NOTHING = frozenset({bool, int, float, str, bytes, type, type(None), types.FunctionType, Tensor})
_OF_ALL_MODULES = frozenset(vars(nn.Module())) | {"_trainer", "_fabric"}
Path = tuple[str, Any, int]


class CannotRepeatError(Exception):
    """A step takes from the iterator of this name, which cannot be put back."""


class Outside:
    """Keeps what is beside a module while a step is run once more than on one device.

    Args:
        root: The LightningModule.
        step: Name of its method, whose Python module has the globals that are looked at.
        others: Objects that the step can reach beside, such as optimizers.
    """

    def __init__(self, root: nn.Module, step: str, others: Callable[[], Iterable[Any]]) -> None:
        self._root, self._others = root, others
        method = inspect.unwrap(getattr(type(root), step))
        self._globals: dict[str, Any] = getattr(method, "__globals__", {})
        self._saved: list[tuple[Any, Any]] = []
        self._named: dict[str, Any] = {}
        self._places: dict[str, tuple[Any, Any]] = {}

    def keep(self) -> None:
        """Note all that is there."""
        self._saved.clear()
        self._named = dict(self._globals)
        self._places = {name: (found, _place(found)) for name, found in self._walk()}

    def restore(self) -> None:
        """Put it back, apart from iterators."""
        for container, saved in self._saved:
            refill(container, saved)
        for name, value in self._named.items():
            if self._globals.get(name) is not value:
                self._globals[name] = value

    def check(self) -> None:
        """Look at the iterators.

        Raises:
            CannotRepeatError: One was asked for its next value, or may have been, since `keep`.
        """
        for name, (found, place) in self._places.items():
            if place is None or _place(found) != place:
                raise CannotRepeatError(name)

    def _walk(self) -> Iterator[tuple[str, Any]]:
        """Note containers; give iterators, with what they are called."""
        seen: set[int] = set()
        pending: deque[Path] = deque(self._roots())
        for _ in range(_MOST_SEEN):
            if not pending:
                return
            name, value, depth = pending.popleft()
            if type(value) in _HOLDS_NOTHING:
                continue
            if _is_iterator(value):
                yield name, value
                continue
            held = filled_by(value)
            if is_array(value) and id(value) not in seen:
                seen.add(id(value))
                self._saved.append((value, value.copy()))
            if held is None or id(held) in seen or not depth:
                continue
            seen.add(id(held))
            if not isinstance(held, tuple):
                self._saved.append((held, contents_of(held)))
            if len(held) <= _MOST:
                pending.extend((f"{name}.{key}", item, depth - 1) for key, item in items_of(held))

    def _roots(self) -> Iterator[Path]:
        for other in self._others():
            held = other if isinstance(other, list | dict) else vars(other)
            yield type(other).__name__, held, _DEPTH
        for name, value in self._globals.items():
            if not name.startswith("__") and not isinstance(value, types.ModuleType):
                yield name, value, _DEPTH
        for path, module in self._root.named_modules():
            own = [
                (name, value)
                for name, value in vars(module).items()
                if name not in _OF_ALL_MODULES and type(value) not in _HOLDS_NOTHING
            ]
            for name, value in own:
                yield f"{path}.{name}".lstrip("."), value, _DEPTH


class Apart:
    """Lets steps run once more than on one device and leave nothing behind, in the module or beside it.

    Args:
        root: The LightningModule.
        others: Objects that a step can reach beside, such as optimizers.
        owners: What of these a step may change.
    """

    def __init__(
        self, root: nn.Module, others: Callable[[], Iterable[Any]], owners: Callable[[], Iterable[Owner]]
    ) -> None:
        self._root, self._others, self._owners = root, others, owners
        self._outside: dict[str, Outside] = {}

    @contextmanager
    def running(self, step: str) -> Iterator[Outside]:
        """Around a run of a step, which may not take from an iterator.

        Raises:
            CannotRepeatError: It does.
        """
        if step not in self._outside:
            self._outside[step] = Outside(self._root, step, self._others)
        outside, writes = self._outside[step], WritesUndone()
        before = ModuleState(self._root, writes_undone=True)
        outside.keep()
        with ExitStack() as stack:
            for undo in (Standing(self._owners()).restore, outside.restore, writes.restore, before.restore):
                stack.callback(undo)
            with writes:
                yield outside
            outside.check()


def _is_iterator(value: Any) -> bool:
    """Whether it has a place that cannot be put back: an object of the user's own has attributes."""
    is_file = hasattr(type(value), "fileno")
    return isinstance(value, Iterator) and not is_file and attributes_of(value) is None


def _place(iterator: Any, depth: int = 3) -> Any:
    """Where an iterator stands, to compare; None where it does not tell."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return "done" if frame is None else (frame.f_lasti, _compared(frame.f_locals, depth))
    yielded = getattr(iterator, "_num_yielded", None)  # of a DataLoader's iterator, which others imitate
    if yielded is not None:
        return yielded
    held = getattr(iterator, "__dict__", None)
    if held is not None:  # what its class makes for a pickle may be copies
        return _compared(dict(held), depth)
    try:
        with warnings.catch_warnings(action="ignore"):
            made = iterator.__reduce__()[1:]
    except TypeError:
        return None
    return _compared(made, depth)


def _compared(values: Any, depth: int) -> Any:
    """Numbers and the places of iterators below, and which objects the others are."""
    if isinstance(values, int | float | str | range) or values is None:
        return values
    if isinstance(values, Iterator) and depth:
        return _place(values, depth - 1)
    if isinstance(values, tuple | list | dict) and depth:
        return [_compared(value, depth - 1) for _, value in items_of(values)]
    return id(values)
