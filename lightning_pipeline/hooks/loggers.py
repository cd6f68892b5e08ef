"""What the user's hooks and steps give to loggers by themselves: complete, and once a batch."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import getattr_static, isfunction
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_pipeline.data import merge_outputs
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.model.rules import equal
from lightning_pipeline.model.tensors import map_tensors
from lightning_pipeline.patching import Undo, all_undone, patch

Complete = Callable[[Any], Any]
"""Gives a value with the tensors of other stages in it; all ranks call it."""


class Write(NamedTuple):
    """A call of a logger, or of its `experiment`.

    Attributes:
        name: Of what is called.
        function: That.
        args: It is given these.
        kwargs: Likewise.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def do(self) -> None:
        """Call it."""
        self.function(*self.args, **self.kwargs)


class StepWrites:
    """What a step gives to loggers: noted while its micro-batches run, and written when the batch is done.

    Args:
        trainer: Of the run.
        running: Which micro-batch's step runs in this thread; None outside of steps, and what is negative on
            other stages than the last.
    """

    def __init__(self, trainer: Trainer, running: Callable[[], int | None]) -> None:
        self._trainer, self._running, self._loggers = trainer, running, trainer.loggers
        self._taken: dict[int, list[Write]] = {}
        self._aside: list[Write] | None = None
        self._drops = False
        self._sizes: Sequence[int] = ()

    def begin(self, sizes: Sequence[int]) -> None:
        """A batch begins.

        Args:
            sizes: Samples of its micro-batches.
        """
        self._taken.clear()
        self._sizes = sizes

    def takes(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether a call is kept, or is none, rather than made now."""
        microbatch = self._running()
        if self._drops:
            return True
        if self._aside is None and (microbatch is None or microbatch == 0 == len(self._sizes) - 1):
            return False
        if self._aside is not None or (microbatch is not None and microbatch >= 0):
            into = self._taken.setdefault(microbatch or 0, []) if self._aside is None else self._aside
            args, kwargs = map_tensors(_copied, (args, kwargs))
            into.append(Write(name, function, args, kwargs))
        return True

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Inside, a run of the step writes nothing: one more than on one device."""
        self._drops, drops = True, self._drops
        try:
            yield
        finally:
            self._drops = drops

    @contextmanager
    def noted(self) -> Iterator[list[Write]]:
        """Inside, a run of the step for the whole batch writes nothing: gives what it would write."""
        self._aside, self._drops, before = [], False, (self._trainer.loggers, self._drops)
        self._trainer.loggers = self._loggers
        try:
            yield self._aside
        finally:
            (self._trainer.loggers, self._drops), self._aside = before, None

    @property
    def any(self) -> bool:
        """Whether the micro-batches of this batch have written anything."""
        return bool(self._taken)

    def write(self, as_one: Sequence[Write] | None) -> bool:
        """Write what the batch as one does, or what its micro-batches do, put together.

        Args:
            as_one: What the batch as one writes; None where nobody knows.

        Returns:
            Whether that is one device's for sure.
        """
        taken = [self._taken.get(number, []) for number in range(len(self._sizes))]
        self._taken.clear()
        calls, is_sure = (as_one, True) if as_one is not None else self._merged(taken)
        for one in calls:
            one.do()
        return is_sure

    def _merged(self, taken: Sequence[Sequence[Write]]) -> tuple[list[Write], bool]:
        """One call for the calls of all micro-batches, or all of these; and whether they are the same."""
        if len({tuple(one.name for one in own) for own in taken}) > 1:
            return [one for own in taken for one in own], False
        merged: list[Write] = []
        is_same = True
        for calls in zip(*taken, strict=True):
            given = [(one.args, one.kwargs) for one in calls]
            try:
                args, kwargs = merge_outputs(given, list(self._sizes))
            except ConfigurationError:
                merged, is_same = [*merged, *calls], False
                continue
            is_same = is_same and all(equal(given[0], one) for one in given[1:])
            merged.append(calls[0]._replace(args=args, kwargs=kwargs))
        return merged, is_same


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def complete_in_loggers(loggers: Iterable[Logger], complete: Complete, writes: StepWrites) -> Undo:
    """Let calls of loggers and their `experiment` in hooks take part in reading, on every rank.

    Only one rank's logger does anything; on the others its calls are empty, and nobody would tell that rank
    what they have. For a run the methods of their classes are replaced; other objects of these classes do
    what they did.

    Args:
        loggers: Of the Trainer.
        complete: Called with the arguments of every call.
        writes: Has those of steps.

    Returns:
        Undoes it.
    """
    own = list(loggers)

    def serves(logger: Any) -> bool:
        return any(logger is one for one in own)

    undo = []
    for kind in dict.fromkeys(type(logger) for logger in own):
        for name in dir(kind):
            made = None if name.startswith("_") else _replacement(kind, name, serves, complete, writes)
            if made is not None:
                undo.append(patch(kind, name, made))
    return all_undone(undo)


def _replacement(
    kind: type[Logger], name: str, serves: Callable[[Any], bool], complete: Complete, writes: StepWrites
) -> Any:
    """What stands in the place of a method, or of `experiment`; `None` for other attributes."""
    original: Any = getattr_static(kind, name)
    made = partial(_call, complete, writes)
    if isfunction(original):

        @wraps(original)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not serves(self):
                return original(self, *args, **kwargs)
            return made(name, partial(original, self), args, kwargs)

        return call
    if name != "experiment":
        return None

    def find(self: Any) -> Any:
        value = original.__get__(self, type(self))
        return Experiment(value, made) if serves(self) else value

    return property(find, doc=original.__doc__)


def _call(
    complete: Complete, writes: StepWrites, name: str, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """What a call of a logger gives: nothing in a step, whose calls are kept until the batch is done."""
    if writes.takes(name, function, args, kwargs):
        return None
    args, kwargs = complete((args, kwargs))
    return function(*args, **kwargs)


class Experiment:
    """Passes everything on to the `experiment` of a logger; what it calls gets complete values.

    Args:
        real: What it passes to; on ranks that write nothing, something that does nothing.
        call: Called with the name of what is called, that, and the arguments.
    """

    def __init__(self, real: Any, call: Callable[[str, Callable[..., Any], Any, Any], Any]) -> None:
        object.__setattr__(self, "_real", real)
        object.__setattr__(self, "_call", call)

    @property
    def __class__(self) -> Any:
        """So that `isinstance` says what it says on one device."""
        return type(self._real)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        self._real.__class__ = kind

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not callable(value) or isinstance(value, type):
            return value
        return lambda *args, **kwargs: self._call(name, value, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        self._call(f"set {name}", partial(setattr, self._real, name), (value,), {})

    def __getitem__(self, key: Any) -> Any:
        return Experiment(self._real[key], partial(_under, self._call, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._call(f"set [{key!r}]", partial(operator.setitem, self._real, key), (value,), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("call", self._real, args, kwargs)

    def __eq__(self, other: object) -> bool:
        return bool(self._real == (other._real if type(other) is Experiment else other))

    def __hash__(self) -> int:
        return hash(self._real)

    def __repr__(self) -> str:
        return repr(self._real)

    def __dir__(self) -> list[str]:
        return dir(self._real)


def _under(call: Callable[..., Any], key: Any, name: str, *rest: Any) -> Any:
    return call(f"[{key!r}] {name}", *rest)
