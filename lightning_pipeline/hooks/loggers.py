"""What the user's hooks give to loggers, which write on one rank: values of other stages are complete."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import getattr_static, isfunction
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_pipeline.patching import Undo, all_undone, patch

Complete = Callable[[Any], Any]
"""Gives a value with the tensors of other stages in it; all ranks call it."""


def complete_in_loggers(loggers: Iterable[Logger], complete: Complete) -> Undo:
    """Let calls of loggers and their `experiment` in hooks take part in reading, on every rank.

    Only one rank's logger does anything; on the others its calls are empty, and nobody would tell that rank
    what they have. For a run the methods of their classes are replaced; other objects of these classes do
    what they did.

    Args:
        loggers: Of the Trainer.
        complete: Called with the arguments of every call.

    Returns:
        Undoes it.
    """
    own = list(loggers)

    def serves(logger: Any) -> bool:
        return any(logger is one for one in own)

    undo = []
    for kind in dict.fromkeys(type(logger) for logger in own):
        for name in dir(kind):
            made = None if name.startswith("_") else _replacement(kind, name, serves, complete)
            if made is not None:
                undo.append(patch(kind, name, made))
    return all_undone(undo)


def _replacement(kind: type[Logger], name: str, serves: Callable[[Any], bool], complete: Complete) -> Any:
    """What stands in the place of a method, or of `experiment`; `None` for other attributes."""
    original: Any = getattr_static(kind, name)
    if isfunction(original):

        @wraps(original)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if serves(self):
                args, kwargs = complete((args, kwargs))
            return original(self, *args, **kwargs)

        return call
    if name != "experiment":
        return None

    def find(self: Any) -> Any:
        value = original.__get__(self, type(self))
        return Experiment(value, complete) if serves(self) else value

    return property(find, doc=original.__doc__)


def _call(function: Callable[..., Any], complete: Complete) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = complete((args, kwargs))
        return function(*args, **kwargs)

    return call


class Experiment:
    """Passes everything on to the `experiment` of a logger; what it calls gets complete values.

    Args:
        real: What it passes to; on ranks that write nothing, something that does nothing.
        complete: Called with the arguments of every call.
    """

    def __init__(self, real: Any, complete: Complete) -> None:
        object.__setattr__(self, "_real", real)
        object.__setattr__(self, "_complete", complete)

    @property
    def __class__(self) -> Any:
        """So that `isinstance` says what it says on one device."""
        return type(self._real)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        self._real.__class__ = kind

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return _call(value, self._complete) if callable(value) and not isinstance(value, type) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, self._complete(value))

    def __getitem__(self, key: Any) -> Any:
        return Experiment(self._real[key], self._complete)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._real[key] = self._complete(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self._real, self._complete)(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return bool(self._real == (other._real if type(other) is Experiment else other))

    def __hash__(self) -> int:
        return hash(self._real)

    def __repr__(self) -> str:
        return repr(self._real)

    def __dir__(self) -> list[str]:
        return dir(self._real)
