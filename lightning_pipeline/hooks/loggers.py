"""What the user's hooks give to loggers, which write on one rank: values of other stages are complete."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from lightning.pytorch.loggers import Logger

Complete = Callable[[Any], Any]
"""Gives a value with the tensors of other stages in it; all ranks call it."""
_NEW: Any = object().__reduce_ex__(2)[0]


def complete_in_loggers(loggers: Iterable[Logger], complete: Complete) -> Callable[[], None]:
    """Let calls of loggers and their `experiment` in hooks take part in reading, on every rank.

    Only one rank's logger does anything; on the others its calls are empty, and nobody would tell that rank
    what they have. For a run each logger is of a class of the same name that inherits from its own.

    Args:
        loggers: Of the Trainer.
        complete: Called with the arguments of every call.

    Returns:
        Undoes it.
    """
    kinds = [(logger, type(logger)) for logger in loggers]
    for logger, kind in kinds:
        with suppress(TypeError):  # a class with slots: its calls go unseen, as before
            logger.__class__ = _completing(kind, complete)

    def undo() -> None:
        for logger, kind in kinds:
            with suppress(TypeError):
                logger.__class__ = kind

    return undo


def _completing(kind: type[Logger], complete: Complete) -> type[Logger]:
    def find(self: Logger, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name.startswith("_") or isinstance(value, type):
            return value
        if name == "experiment":
            return Experiment(value, complete)
        return _call(value, complete) if callable(value) else value

    def reduce(self: Logger, protocol: int) -> Any:  # pickled and copied as what it is without the run
        made: Any = kind.__reduce_ex__(self, protocol)
        function, arguments, *rest = made
        if function is _NEW:  # which asks for an instance of that very class
            function = _new
        return (function, tuple(kind if one is type(self) else one for one in arguments), *rest)

    names = {
        "__getattribute__": find,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), names)


def _new(kind: type[Any], *args: Any) -> Any:
    return kind.__new__(kind, *args)


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
