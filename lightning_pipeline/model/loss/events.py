"""What a step's functions were called with, and what a number is worth."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.model.tensors import is_placeholder

Call = tuple[int, int] | None
Recipe = int | None
"""A digest of all calls that lead to a value; None where something stands in it that nobody knows."""
_KEPT = 4096  # elements of a tensor that is kept
SHAPES, TARGETS, VALUES = range(3)


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
        self._made: dict[Recipe, Seen] = {}

    def run(
        self, after: Call, func: Any, args: Any, kwargs: Any, recipe: Recipe, run: Callable[[], Any]
    ) -> Any:
        """Run a function and note the call, and what it makes."""
        forms = _forms(tuple(args)), {name: _forms(value) for name, value in kwargs.items()}
        calls = self._seen.setdefault(after, [])
        place = len(calls)
        result = run()
        shape: Any = tuple(result.shape) if isinstance(result, Tensor) else None
        if isinstance(result, tuple) and all(isinstance(one, Tensor) for one in result):
            shape = tuple(tuple(one.shape) for one in result)
        seen = Seen(func, *forms, shape)
        calls.insert(place, seen)
        if recipe is not None:
            self._made[recipe] = seen
        return result

    def without_values(self) -> "Calls":
        """For another batch, which has its own."""
        forms = Calls()
        forms._seen = {unit: list(map(_without_values, calls)) for unit, calls in self._seen.items()}
        forms._made = {recipe: _without_values(call) for recipe, call in self._made.items()}
        return forms

    def apart_from(self, other: "Calls") -> None:
        """Mark what is another in a run for which something else was made up."""
        for unit, calls in self._seen.items():
            theirs = other._seen.get(unit, [])
            alike = 0
            while alike < min(len(calls), len(theirs)) and calls[alike].func == theirs[alike].func:
                alike += 1
            self._seen[unit] = list(map(_marked, calls[:alike], theirs))
        both = self._made.keys() & other._made.keys()
        self._made = {recipe: _marked(self._made[recipe], other._made[recipe]) for recipe in both}

    def after(self, unit: Call) -> Iterator[Seen]:
        """Those after a call of a unit, in order."""
        return iter(self._seen.get(unit, ()))

    def that_makes(self, recipe: Recipe) -> Seen | None:
        """The call of this run that makes the same as another run's."""
        return self._made.get(recipe)


def _forms(value: Any) -> Any:
    if isinstance(value, Tensor):
        shape, computed = tuple(value.shape), is_placeholder(value)
        if computed or value.numel() > _KEPT:
            return Form(shape, computed=computed)
        copy = value.detach().clone()  # without values where something without was written into it
        return Form(shape, computed=True) if is_placeholder(copy) else Form(shape, copy)
    return type_of(value)(map(_forms, value)) if isinstance(value, list | tuple) else value


def _without_values(call: Seen) -> Seen:
    return call._replace(args=_bare(call.args), kwargs={k: _bare(v) for k, v in call.kwargs.items()})


def _marked(mine: Seen, theirs: Seen) -> Seen:
    kwargs = {name: _told_apart(value, theirs.kwargs.get(name)) for name, value in mine.kwargs.items()}
    result = mine.result if mine.result == theirs.result else None
    return Seen(mine.func, _told_apart(mine.args, theirs.args), kwargs, result)


def _told_apart(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, Form):
        if not isinstance(theirs, Form) or theirs.shape != mine.shape:
            return mine._replace(guessed=True)
        known = mine.value is not None and theirs.value is not None and torch.equal(mine.value, theirs.value)
        return mine._replace(value=mine.value if known else None)
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


def but_the_same(places: tuple[Any, ...], seen: Seen | None) -> tuple[Any, ...]:
    """Indices without masks that are the whole batch's, too: they pick of what each sample has."""
    whole: Any = seen.args[1] if seen is not None and len(seen.args) > 1 else ()
    theirs = whole if type(whole) is tuple else (whole,)
    if len(theirs) != len(places):
        return places
    return tuple(mine for mine, form in zip(places, theirs, strict=True) if not _is_same_tensor(mine, form))


def _is_same_tensor(mine: Any, theirs: Any) -> bool:
    if not (isinstance(mine, Tensor) and isinstance(theirs, Form)) or theirs.value is None or theirs.guessed:
        return False
    return theirs.shape == tuple(mine.shape) and bool(torch.equal(theirs.value.to(mine), mine))


def same_beside(seen: Seen | None, args: Any, kwargs: Any, position: int) -> bool:
    """Whether the whole batch's call has the same but for one of its arguments."""
    if seen is None or len(seen.args) != len(args) or seen.kwargs.keys() != kwargs.keys():
        return False
    pairs = [pair for at, pair in enumerate(zip(args, seen.args, strict=True)) if at != position]
    return all(_is_same(*pair) for pair in (*pairs, *((kwargs[key], seen.kwargs[key]) for key in kwargs)))


def _is_same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor):
        return _is_same_tensor(mine, theirs)
    if isinstance(mine, list | tuple):
        paired = isinstance(theirs, list | tuple) and len(mine) == len(theirs)
        return paired and all(map(_is_same, mine, theirs))
    return type(mine) is type(theirs) and bool(mine == theirs)


class Operand(NamedTuple):
    """What a function was given, as far as it matters: its shape, and where it is one number, that.

    `value` is None where there are several, or where units compute it; `guessed` says that shape or number go
    by what was made up for what units compute.
    """

    shape: tuple[int, ...]
    value: Tensor | float | None = None
    computed: bool = False
    guessed: bool = False

    @property
    def elements(self) -> int:
        """How many elements."""
        return math.prod(self.shape)


class Event(NamedTuple):
    """One call of a function that is followed."""

    func: Any
    operands: tuple[Operand, ...]
    result: tuple[int, ...]
    divisor: Any = None  # what a loss divides by, where that is no number of elements


class OwnDivisor(NamedTuple):
    """What a micro-batch divides a sum over samples by, where the batch's divisor is known when all have run.

    Attributes:
        weight: What the quotient is multiplied with to be the micro-batch's part of the batch's dividend.
        total: Its part of the batch's divisor.
        least: What the batch's divisor is at least, as after `clamp(min=...)`.
        is_count: Whether it is the number of values of a mean: of none, nothing has a gradient but 0.
    """

    weight: float
    total: float
    least: float = -math.inf
    is_count: bool = False


class Share(NamedTuple):
    """A value of the whole batch's step, as this micro-batch's part of it: factor times tensor, term by term.

    `origin` is what the factors were read from: one of `SHAPES`, `TARGETS` (of a loss over classes) and
    `VALUES`. `lost` is the line from where on the value could not be followed,
    `picked` marks samples that a mask picked, `single` what has no samples of its own, such as their mean,
    and `apart` a value that its terms do not have as it is: it may be 0/0 where they count for nothing.
    `read` says of a Python number which of those that the step reads it is, and `made_up` that the whole
    batch's step had a made-up one in its place. `own` is what a quotient of two sums that units decide is
    divided by, `floor` the part of a sum before `clamp(min=...)`, and this bound; both are lost otherwise.
    """

    terms: tuple[tuple[float, Tensor], ...]
    origin: int = 0
    lost: str = ""
    picked: bool = False
    single: bool = False
    apart: bool = False
    read: int = 0
    made_up: bool = False
    own: "OwnDivisor | None" = None
    floor: tuple[float, float] | None = None

    def total(self) -> Tensor | None:
        """The part as a number; None where nothing counts."""
        parts = [tensor.detach() * factor for factor, tensor in self.terms if factor]
        return sum(parts[1:], parts[0]) if parts else None


@dataclass(slots=True)
class Guess:
    """What a step is told of values that no unit has computed, so that it goes on.

    Attributes:
        number: What is read of a tensor.
        share: Of the rows of a tensor, those that a mask picks.
        more: Added to what is read where it is a whole number.
        made: Whether anything was asked.
        few: Whether values of which the step asks for those that differ are all alike; else no two are.
        counts_apart: Whether it asks for these.
    """

    number: float
    share: float
    more: int = 0
    made: bool = False
    few: bool = False
    counts_apart: bool = False


@dataclass(slots=True)
class Whole:
    """What the whole batch's step showed.

    Attributes:
        events: Calls of functions that are followed, in order, by the call of a unit that came before; what a
            step does with masks before it often goes by their values, and is none of a loss's business.
        targets: For each loss over classes, which tensor of the batch its targets are and which class it
            leaves out; None where they are made otherwise.
        ragged: Whether a mask picks samples, so that shapes go by values.
        reads: Whether a value of the batch was read as a number.
        calls: All calls between units.
        made: Calls of functions that are followed, by what they make.
        returned: What the loss is made of; None where nobody knows.
        is_at_end: Whether the step has come to its end.
        held: Tensors that stand for themselves in what is known of `made`.
        sized: Places of Python numbers that are counts of samples.
        remembered: Whether this is another batch of the same shapes, so that its numbers are those of before.
        unclear: What draws random numbers that are not known to be those of the micro-batches.
    """

    events: dict[Call, list[Event]] = field(default_factory=dict)
    targets: list[tuple[int, int] | None] = field(default_factory=list)
    ragged: bool = False
    reads: bool = False
    unclear: str = ""
    calls: Calls = field(default_factory=Calls)
    made: dict[Recipe, Event] = field(default_factory=dict)
    returned: Recipe = None
    is_at_end: bool = False
    held: list[Tensor] = field(default_factory=list)
    sized: set[tuple[Any, ...]] = field(default_factory=set)
    remembered: bool = False
