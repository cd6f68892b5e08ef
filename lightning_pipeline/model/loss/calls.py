"""Calls of any function between units in the whole batch's step, found again in a micro-batch's."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_pipeline.model.tensors import is_placeholder

Call = tuple[int, int] | None
_KEPT = 4096  # elements of a tensor that is kept


class Form(NamedTuple):
    """What is kept of a tensor; `value` is None where units compute it, or where it is large."""

    shape: tuple[int, ...]
    value: Tensor | None = None
    computed: bool = False


class Seen(NamedTuple):
    """A call: its arguments, with a `Form` for each tensor, and the shape of its result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: tuple[int, ...] | None


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
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
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
    return theirs.shape != tuple(value.shape) if isinstance(theirs, Form) else None
