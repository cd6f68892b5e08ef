"""What is noted of the functions that a step calls, and what a number is worth."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from lightning_pipeline.model.loss.calls import Call, Calls

SHAPES, TARGETS, VALUES = range(3)


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


class Share(NamedTuple):
    """A value of the whole batch's step, as this micro-batch's part of it: factor times tensor, term by term.

    `origin` is what the factors were read from: one of `SHAPES`, `TARGETS` (of a loss over classes) and
    `VALUES`. `lost` is the line from where on the value could not be followed,
    `picked` marks samples that a mask picked, `single` what has no samples of its own, such as their mean,
    and `apart` a value that its terms do not have as it is: it may be 0/0 where they count for nothing.
    `read` says of a Python number which of those that the step reads it is.
    """

    terms: tuple[tuple[float, Tensor], ...]
    origin: int = 0
    lost: str = ""
    picked: bool = False
    single: bool = False
    apart: bool = False
    read: int = 0

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
    """

    number: float
    share: float
    more: int = 0
    made: bool = False


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
    sized: set[tuple[Any, ...]] = field(default_factory=set)
    remembered: bool = False
