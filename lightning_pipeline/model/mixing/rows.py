"""Functions that a step calls on the batch alone, and each micro-batch's part of what they give for all.

A step such as mixup's, `x = lam * x + (1 - lam) * x[torch.randperm(len(x))]`, is run for the whole batch and
for each micro-batch, without units. Both call the same functions. What one gives for the whole batch is then
given to each micro-batch: its rows, where the two results differ in the one dimension that samples have, and
all of it where they have the same shape, as `x.mean(0)` has.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.mixing.calls import NUMBERS, Called, Functions, Run, Seen, fresh
from lightning_pipeline.model.mixing.meetings import is_set
from lightning_pipeline.model.mixing.positions import Positions
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.tensors import (
    same_values,
    tensors_in,
)


class _CannotError(Exception):
    """What a function gives for a micro-batch is no part of what it gives for the batch."""


class Rows:
    """Which rows of a batch a micro-batch has.

    Args:
        start: The first.
        count: How many.
        total: Of the batch.
    """

    def __init__(self, start: int, count: int, total: int) -> None:
        self.start, self.count, self.total = start, count, total

    def of(self, whole: Tensor, own: Tensor) -> Tensor | None:
        """The part of a result that the micro-batch has; None where shapes do not say.

        Args:
            whole: What a function gave for the batch.
            own: What it gave for the micro-batch by itself.
        """
        if whole.dtype != own.dtype or whole.dim() != own.dim():
            return None
        if whole.shape == own.shape:
            return whole
        uneven = [d for d in range(own.dim()) if own.shape[d] != whole.shape[d]]
        if len(uneven) > 1 or (whole.shape[uneven[0]], own.shape[uneven[0]]) != (self.total, self.count):
            return None
        return whole.narrow(uneven[0], self.start, self.count)

    def holds(self, whole: Tensor, own: Tensor) -> bool:
        """Whether a result has the samples' values of the batch's, as of joined views or joined tokens."""
        if whole.dtype != own.dtype or whole.dim() != own.dim():
            return False
        uneven = [d for d in range(own.dim()) if own.shape[d] != whole.shape[d]]
        if not uneven:
            return _close(whole, own)
        dimension, *others = uneven
        times, rest = divmod(whole.shape[dimension], self.total)
        if others or rest or own.shape[dimension] != times * self.count:
            return False
        for before in (one for one in range(1, times + 1) if times % one == 0):
            cut = whole.unflatten(dimension, (before, self.total, times // before))
            part = cut.narrow(dimension + 1, self.start, self.count).flatten(dimension, dimension + 2)
            if _close(part, own):
                return True
        return False


class _Answer(NamedTuple):
    """What a call is answered with; `is_given` is false where it is to be run."""

    func: Any
    is_given: bool = False
    value: Any = None
    writes: bool = False


class Followed(Functions):
    """A run of a step for one micro-batch that has its part of the batch's values.

    Args:
        whole: The step's run for the batch.
        own: For the micro-batch, with its own values.
        rows: Of the micro-batch.
        added: Places of numbers that add up; see `sums_of_parts`.

    Attributes:
        failed: Whether that cannot be done.
        leaves_some: Whether the micro-batch has its own of something that the step makes after it has read
            values of units.
    """

    def __init__(self, whole: Seen, own: Seen, rows: Rows, added: Collection[int] = ()) -> None:
        self._whole, self._own, self._rows, self._added = whole.calls, own.calls, rows, added
        self.failed = whole.keys != own.keys or whole.host != own.host
        self._before = True  # no unit has been called
        self.leaves_some = False
        self._has_read = False  # values of units, which are made up here and may choose what comes then
        self._positions = Positions()
        self.answers: list[_Answer] = []

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called."""
        self._before = False
        unknown = self._positions.among(given)
        self.failed = self.failed or self._taken(number) is None or unknown
        self.answers.append(_Answer(number))

    def _taken(self, func: Any) -> tuple[Called, Called] | None:
        place = len(self.answers)
        if place >= len(self._whole) or self._whole[place].func != func:
            return None
        return self._whole[place], self._own[place]

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """Answer with the micro-batch's part of what the batch has."""
        found = None if self.failed else self._taken(func)
        if found is None:
            self.failed = True
            return run(func, args, kwargs)
        try:
            self._check_given(*found, args, kwargs)
            answer = None if self._has_read else self._answer(*found)
            if answer is None:
                answer = _Answer(func)
                result = run(func, args, kwargs)
                own = found[0].picked and found[1].picked
                if not own and (self._before or (self._has_read and not found[0].opaque)):
                    self._see(found[0].result, result)
                self._has_read = self._has_read or found[0].reads
            else:
                result = _given(answer, args, kwargs, run)
        except _CannotError:
            self.failed = True
            return run(func, args, kwargs)
        self.answers.append(answer)
        numbers = self._rows.total in found[0].lengths and self._rows.count in found[1].lengths
        writes = found[0].target is not None
        self._positions.note(
            func, args, kwargs, result, is_given=answer.is_given, writes=writes, numbers=numbers
        )
        return result

    def _see(self, whole: Any, result: Any) -> None:
        """What is run for the micro-batch gives what the batch's samples have, or is its own in the end."""
        try:
            self._check(whole, result)
        except _CannotError:
            if self._before:
                raise
            self.leaves_some = True

    def _check_given(self, whole: Called, own: Called, args: Any, kwargs: Any) -> None:
        """What is done with numbers of the batch's rows, or written beside a result, has to be known."""
        opaque = whole.opaque or own.opaque
        if opaque and self._positions.among((args, kwargs)):
            raise _CannotError  # a micro-batch's value has only its own rows
        if kwargs.get("out") is not None or self._positions.leave(whole.func, args):
            raise _CannotError

    def _answer(self, whole: Called, own: Called) -> _Answer | None:
        """None where the function is to be run."""
        if whole.opaque or own.opaque:
            if self._before:
                raise _CannotError
            return None
        if whole.target is not None:
            part = None if own.target is None else self._rows.of(whole.target, own.target)
            if part is None:
                raise _CannotError
            return _Answer(whole.func, is_given=True, value=part, writes=True)
        if not self._before and len(self.answers) in self._added:
            return None
        if whole.func in NUMBERS or (whole.counts and own.result == whole.result):
            return _Answer(whole.func, is_given=True, value=whole.result)
        if not self._before and self._positions.are_all(whole.func):
            return None  # by which values of units are chosen, as in `logits[torch.arange(n), y]`
        if whole.is_given or (whole.picked and own.picked):
            return None  # of which the micro-batch has its own
        value = self._part(whole.result, own.result, is_set=is_set(whole.func))
        return None if value is None else _Answer(whole.func, is_given=True, value=value)

    def _part(self, whole: Any, own: Any, *, is_set: bool = False) -> Any:
        if isinstance(whole, Tensor) and isinstance(own, Tensor):
            return whole if is_set else self._rows.of(whole, own)
        tensors = isinstance(whole, tuple | list) and all(isinstance(one, Tensor) for one in whole)
        if not tensors or not whole or len(whole) != len(own):
            return None
        if is_set and len(whole[0]) == self._rows.total:
            return None  # what else there is may be of samples or of these
        parts = [
            self._part(*pair, is_set=is_set and not place)
            for place, pair in enumerate(zip(whole, own, strict=True))
        ]
        return None if any(part is None for part in parts) else type(whole)(parts)

    def _check(self, whole: Any, result: Any) -> None:
        """What is run for the micro-batch has to give what the batch's samples have."""
        mine, theirs = list(tensors_in(result)), list(tensors_in(whole))
        if (
            isinstance(whole, tuple | list)
            and len(theirs) == self._rows.total
            and len(mine) == self._rows.count
        ):
            theirs = theirs[self._rows.start : self._rows.start + self._rows.count]  # one for each sample
        if len(mine) != len(theirs):
            raise _CannotError
        if not all(self._rows.holds(*pair) for pair in zip(theirs, mine, strict=True)):
            raise _CannotError


class Beside(Functions):
    """One who looks at what a run of a step does with what another one gives it.

    Args:
        sees: The one who looks.
        gives: The other.
    """

    def __init__(self, sees: Functions, gives: Functions) -> None:
        self._sees, self._gives = sees, gives

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called."""
        self._sees.unit(number, given, seeds)
        self._gives.unit(number, given, seeds)

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """A function is called."""
        return self._sees.call(func, args, kwargs, lambda f, a, k: self._gives.call(f, a, k, run))

    def end(self, result: Any) -> None:
        """The step has returned this."""
        self._sees.end(result)
        self._gives.end(result)

    def leaves(self, root: nn.Module) -> None:
        """The step is over."""
        self._sees.leaves(root)
        self._gives.leaves(root)


class Given(Functions):
    """A micro-batch's step on a stage, which is given what `Followed` found.

    Args:
        answers: To each of its calls.
        step: Name of the user's method.
    """

    def __init__(self, answers: Sequence[_Answer], step: str) -> None:
        self._answers, self._step, self._next = answers, step, 0

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called."""
        self._take(number)

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """Answer as was found."""
        answer = self._take(func)
        return run(func, args, kwargs) if not answer.is_given else _given(answer, args, kwargs, run)

    def _take(self, func: Any) -> _Answer:
        answer = self._answers[self._next] if self._next < len(self._answers) else _Answer(func)
        self._next += 1
        if answer.func != func:
            if any(one.is_given for one in self._answers[self._next - 1 :]):
                raise SplitError(
                    f"{self._step} mixes samples of the batch with each other, and does something else when "
                    "it is run again for the same batch, as by the clock, so that a micro-batch cannot be "
                    "given its samples of the batch: mix them in on_after_batch_transfer"
                )
            self._next = len(self._answers)
            return _Answer(func)
        return answer


def _given(answer: _Answer, args: Any, kwargs: Any, run: Run) -> Any:
    run(answer.func, args, kwargs, lambda *call: answer.value)  # a random one is run: the next is another
    if not answer.writes:
        return fresh(answer.value)
    with torch.no_grad():
        args[0].copy_(answer.value)
    return None if getattr(answer.func, "__name__", "") == "__setitem__" else args[0]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    precise = one.dtype is torch.float64
    return torch.allclose(one, other, rtol=1e-12 if precise else 1e-5, atol=0.0, equal_nan=True)


def is_cut_by_rows(whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether micro-batches have the samples of a batch in order.

    Args:
        whole: The batch's arguments.
        parts: Each micro-batch's.
        sizes: Samples of each.
    """
    batch, total, start, found = list(tensors_in(whole)), sum(sizes), 0, False
    for part, size in zip(parts, sizes, strict=True):
        tensors = list(tensors_in(part))
        if len(tensors) != len(batch):
            return False
        for theirs, mine in zip(batch, tensors, strict=True):
            cut = theirs.dim() > 0 and theirs.shape[0] == total and mine.shape[:1] == (size,)
            found = found or cut
            same = theirs[start : start + size] if cut else theirs
            if mine is not same and not same_values(mine, same):
                return False
        start += size
    return found and math.prod(sizes) > 0
