"""Calls of any function between units in the whole batch's step, found again in a micro-batch's."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_pipeline.model.tensors import is_placeholder

Call = tuple[int, int] | None
_KEPT = 4096  # elements of a tensor that is kept


class Form(NamedTuple):
    """What is kept of a tensor; `value` is None where units compute it, or where it is large.

    `guessed` says that its shape goes by what was made up for what units compute.
    """

    shape: tuple[int, ...]
    value: Tensor | None = None
    computed: bool = False
    guessed: bool = False


class Guessed(NamedTuple):
    """A number that goes by what was made up."""


class Seen(NamedTuple):
    """A call: its arguments, with a `Form` for each tensor, and the shape of its result, or of several."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: tuple[Any, ...] | None


class Calls:
    """Those of one run of a step, by the call of a unit that came before."""

    def __init__(self) -> None:
        self._seen: dict[Call, list[Seen]] = {}

    def run(self, after: Call, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a function and note the call."""
        forms = _forms(tuple(args)), {name: _forms(value) for name, value in kwargs.items()}
        calls = self._seen.setdefault(after, [])
        place = len(calls)
        result = run()
        shape: Any = tuple(result.shape) if isinstance(result, Tensor) else None
        if isinstance(result, tuple) and all(isinstance(one, Tensor) for one in result):
            shape = tuple(tuple(one.shape) for one in result)
        calls.insert(place, Seen(func, *forms, shape))
        return result

    def without_values(self) -> "Calls":
        """For another batch, which has its own."""
        forms = Calls()
        forms._seen = {
            unit: [
                call._replace(args=_bare(call.args), kwargs={k: _bare(v) for k, v in call.kwargs.items()})
                for call in calls
            ]
            for unit, calls in self._seen.items()
        }
        return forms

    def apart_from(self, other: "Calls") -> None:
        """Mark what is another in a run for which something else was made up."""
        for unit, calls in self._seen.items():
            theirs = other._seen.get(unit, [])
            alike = 0
            while alike < min(len(calls), len(theirs)) and calls[alike].func == theirs[alike].func:
                alike += 1
            self._seen[unit] = list(map(_marked, calls[:alike], theirs))

    def after(self, unit: Call) -> Iterator[Seen]:
        """Those after a call of a unit, in order."""
        return iter(self._seen.get(unit, ()))


def _forms(value: Any) -> Any:
    if isinstance(value, Tensor):
        shape, computed = tuple(value.shape), is_placeholder(value)
        if computed or value.numel() > _KEPT:
            return Form(shape, computed=computed)
        return Form(shape, value.detach().clone())
    return type_of(value)(map(_forms, value)) if isinstance(value, list | tuple) else value


def _marked(mine: Seen, theirs: Seen) -> Seen:
    kwargs = {name: _told_apart(value, theirs.kwargs.get(name)) for name, value in mine.kwargs.items()}
    result = mine.result if mine.result == theirs.result else None
    return Seen(mine.func, _told_apart(mine.args, theirs.args), kwargs, result)


def _told_apart(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, Form):
        return mine._replace(guessed=not isinstance(theirs, Form) or theirs.shape != mine.shape)
    if isinstance(mine, list | tuple):
        paired = isinstance(theirs, list | tuple) and len(theirs) == len(mine)
        others = theirs if paired else [None] * len(mine)
        return type_of(mine)(map(_told_apart, mine, others))
    same = not isinstance(mine, int | float) or (isinstance(theirs, int | float) and mine == theirs)
    return mine if same else Guessed()


def _bare(value: Any) -> Any:
    if isinstance(value, Form):
        return value._replace(value=None)
    return type_of(value)(map(_bare, value)) if isinstance(value, list | tuple) else value


def type_of(value: list[Any] | tuple[Any, ...]) -> type[list[Any]] | type[tuple[Any, ...]]:
    """What holds other items in the same way."""
    return tuple if isinstance(value, tuple) else list


def pairs(mine: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor has something for each pair of samples: two dimensions that grow alike."""
    if len(mine) != len(whole):
        return False
    grown = [pair for pair in zip(mine, whole, strict=True) if pair[0] != pair[1]]
    return len(grown) > len(set(grown))


def grows(seen: Seen | None, position: int, value: Tensor) -> bool | None:
    """Whether the whole batch's argument is larger; None where nobody knows."""
    theirs = seen.args[position] if seen is not None and position < len(seen.args) else None
    if not isinstance(theirs, Form):
        return None
    return theirs.shape != tuple(value.shape) or (theirs.guessed and theirs.shape != ())
