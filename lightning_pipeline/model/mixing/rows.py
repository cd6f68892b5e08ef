"""Functions that a step calls on the batch alone, and each micro-batch's part of what they give for all.

A step such as mixup's, `x = lam * x + (1 - lam) * x[torch.randperm(len(x))]`, is run for the whole batch and
for each micro-batch, without units. Both call the same functions. What one gives for the whole batch is then
given to each micro-batch: its rows, where the two results differ in the one dimension that samples have, and
all of it where they have the same shape, as `x.mean(0)` has.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.mixing.meetings import is_set, picks
from lightning_pipeline.model.mixing.positions import Positions, lengths
from lightning_pipeline.model.mixing.standing import standing_of
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.tensors import (
    is_placeholder,
    map_tensors,
    same_values,
    storage_key,
    tensors_in,
    user_line,
)

Run = Callable[..., Any]
"""Runs a function: it, arguments, keyword arguments, and what answers in its place."""
_NUMBERS = frozenset(
    {Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.is_nonzero}
)
_ARRAYS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})
_NUMBER = bool | int | float | complex
FORM = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__",
    "__get__", "get_device", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_same_size",
})  # fmt: skip
"""Functions that tell of a tensor what follows from its form, and not from its values."""


class _CannotError(Exception):
    """What a function gives for a micro-batch is no part of what it gives for the batch."""


class Called(NamedTuple):
    """A call of a function, or of a unit.

    Attributes:
        func: The function, or the number of the unit.
        result: What it gave, in copies.
        target: What it has written into its first argument, in a copy; None where it only returns.
        opaque: Whether it has to do with values of units.
        is_given: Whether it returned the very tensor that it was given.
        lengths: Of how many things its result may be numbers.
        reads: Whether it gave Python a value that units have computed.
        picked: Whether it gave as many samples as a mask picked, or as values say.
        read: What a number would be read from, where the batch's is given in its place.
        by_batch: Whether it gave Python a number that follows from the samples.
        standing: Of a unit what decides how it computes.
    """

    func: Any
    result: Any = None
    target: Tensor | None = None
    opaque: bool = False
    is_given: bool = False
    lengths: frozenset[int] = frozenset()
    reads: bool = False
    picked: bool = False
    read: Tensor | None = None
    by_batch: bool = False
    standing: Hashable = None

    @property
    def key(self) -> Hashable:
        """Equal for two calls of the same that may do the same."""
        return self.func, self.standing


class Functions:
    """Stands between a step's code and the functions that it calls between units."""

    def begin(self, batch: Any) -> None:
        """The step begins.

        Args:
            batch: Its arguments.
        """

    def stands(self, module: nn.Module) -> None:
        """This unit is about to be called."""

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called.

        Args:
            number: Its number.
            given: Its arguments.
            seeds: Of the run.
        """
        raise NotImplementedError

    def answered(self, output: Any) -> None:
        """The unit has returned this."""

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """Answer a call of a function.

        Args:
            func: It.
            args: Its arguments.
            kwargs: Likewise.
            run: Runs it.
        """
        raise NotImplementedError

    def end(self, result: Any) -> None:
        """The step has returned this."""


class Seen(Functions):
    """One run of a step, as it is.

    Args:
        elsewhere: Parameters and buffers that some ranks do not have.
        whole: A run for the batch, whose numbers this one for a micro-batch reads.
        root: The LightningModule, where lines are to be noted.
        arrays: Whether it reads arrays and lists of numbers of that run, too.

    Attributes:
        calls: Of functions and units, in order.
        lines: Of each of them.
        host: Where numpy's and Python's generators stood at the first unit.
        returns_more: Whether the step returned something beside its loss.
    """

    def __init__(
        self, elsewhere: Iterable[Tensor] = (), whole: "Seen | None" = None, root: nn.Module | None = None,
        *, arrays: bool = False,
    ) -> None:  # fmt: skip
        self._asked = _NUMBERS | _ARRAYS if arrays else _NUMBERS
        self.calls: list[Called] = []
        self.lines: list[str] = []
        self._root = root
        self.host: int | None = None
        self._standing: Hashable = None
        self.returns_more = self.ended = False
        self._whole: list[Called] = [] if whole is None else whole.calls
        self._elsewhere = {id(one): one for one in elsewhere}
        """These and what is made of them, which ranks may know or not."""
        self._picked: dict[int, Tensor] = {}
        self._of_batch: dict[int, Tensor] = {}
        self._shared: set[int] = set()  # memory that several tensors have
        self._held: list[Tensor] = []

    @property
    def calls_of_units(self) -> dict[tuple[Any, int], int]:
        """The places of calls of units, by the unit and the number of the call."""
        counts, found = Counter[Any](), dict[tuple[Any, int], int]()
        for place, one in enumerate(self.calls):
            if isinstance(one.func, int):
                found[one.func, counts[one.func]] = place
                counts[one.func] += 1
        return found

    def is_made_here(self, value: Any) -> bool:
        """Whether a tensor that the step has left follows from the batch alone: no unit has a part in it."""
        plain = isinstance(value, Tensor) and not (value.requires_grad or is_placeholder(value))
        return plain and id(value) not in self._elsewhere and not any(call.reads for call in self.calls)

    def stands(self, module: nn.Module) -> None:
        """This unit is about to be called."""
        self._standing = standing_of(module)

    def begin(self, batch: Any) -> None:
        """The step begins, with these arguments."""
        self._of_batch = {id(one): one for one in tensors_in(batch)}

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called."""
        if self.host is None:
            self.host = seeds.host_place()
        self._note(Called(number, standing=self._standing))

    def end(self, result: Any) -> None:
        """The step has returned this."""
        self.ended, self.returns_more = True, not isinstance(result, Tensor | None)

    def _note(self, called: Called) -> None:
        self.calls.append(called)
        if self._root is not None:
            self.lines.append(user_line(self._root))

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """Run a function and note what it gave."""
        given, answer = list(tensors_in((args, kwargs))), self._of_whole(func)
        result = run(func, args, kwargs) if answer is None else _fresh(answer.result)
        target = target_of(func, args)
        opaque = any(one.requires_grad or is_placeholder(one) for one in tensors_in((args, kwargs, result)))
        of_units = opaque or any(id(one) in self._elsewhere for one in given)
        if target is not None and not opaque:
            if target._base is not None or storage_key(target) in self._shared:
                opaque = True  # another tensor is written, too
        elif not opaque:
            self._note_memory(args, result)
        opaque = opaque or of_units
        kept = None if opaque else map_tensors(lambda one: one.detach().clone(), result)
        written = None if target is None or opaque else target.detach().clone()
        is_given = target is None and isinstance(result, Tensor) and any(result is arg for arg in args)
        if opaque:
            self._elsewhere.update((id(one), one) for one in tensors_in(result))
        if of_units and target is not None:
            self._elsewhere.update((id(one), one) for one in (target, target._base) if one is not None)
        reads = opaque and isinstance(result, _NUMBER | list) and getattr(func, "__name__", "") not in FORM
        numbers, picked = lengths(func, args, kwargs), self._is_picked(func, args, given, result)
        asked = answer is not None and func in _NUMBERS
        read = args[0].detach().clone() if asked else None
        by_batch = any(id(one) in self._of_batch for one in given)
        if by_batch:
            made = [*tensors_in(result), *(() if target is None else (target,))]
            self._of_batch.update((id(one), one) for one in made)
        is_read = by_batch and not opaque and func in _NUMBERS
        self._note(Called(func, kept, written, opaque, is_given, numbers, reads, picked, read, is_read))
        return result

    def _of_whole(self, func: Any) -> Called | None:
        """The call that reads this number, or makes a set of values, in the run for the batch."""
        place = len(self.calls)
        if (
            not (func in self._asked or is_set(func))
            or place >= len(self._whole)
            or self._whole[place].func is not func
        ):
            return None
        return None if self._whole[place].opaque else self._whole[place]

    def _is_picked(self, func: Any, args: Any, given: Sequence[Tensor], result: Any) -> bool:
        """Whether there are as many samples as values say, and note it."""
        rows = {one.shape[0] for one in given if id(one) in self._picked and one.dim()}
        found = [
            one for one in tensors_in(result) if picks(func, args) or (one.dim() and one.shape[0] in rows)
        ]
        self._picked.update((id(one), one) for one in found)
        return bool(found)

    def _note_memory(self, args: Any, result: Any) -> None:
        given = {storage_key(one) for one in tensors_in(args)}
        for tensor in tensors_in(result):
            self._held.append(tensor)  # so that its memory is no other's
            if storage_key(tensor) in given and not any(tensor is arg for arg in args):
                self._shared.add(storage_key(tensor))


def decided_between(whole: Seen, own: Seen, given: Seen) -> dict[str, tuple[str, int]]:
    """The line at which a number of the batch decides what a step does, which a micro-batch has otherwise.

    It is one that, given to the micro-batch, lets it do what the batch does; or whatever it is that lets a
    unit stand otherwise.

    Args:
        whole: A run for the batch.
        own: One for the micro-batch, with lines.
        given: One for it that reads the batch's numbers.
    """
    theirs, mine, same = ([one.key for one in run.calls] for run in (whole, own, given))
    if mine == theirs or not mine:
        return {}
    if same == theirs:
        pairs = enumerate(zip(mine, theirs, strict=False))
        place = next((n for n, pair in pairs if pair[0] != pair[1]), min(len(mine), len(theirs)))
        units = sum(isinstance(one.func, int) for one in whole.calls[:place])
        return {own.lines[min(place, len(mine) - 1)]: ("a condition", units)}
    of_whole = whole.calls_of_units
    for number, (key, place) in enumerate(own.calls_of_units.items()):
        if key in of_whole and own.calls[place].standing != whole.calls[of_whole[key]].standing:
            return {own.lines[place]: ("a condition", number)}
    return {}


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
        alike = [one.key for one in whole.calls] == [one.key for one in own.calls]
        self.failed = not alike or whole.host != own.host
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
                if self._before or (self._has_read and not found[0].opaque):
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
        if whole.func in _NUMBERS:
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
        return _fresh(answer.value)
    with torch.no_grad():
        args[0].copy_(answer.value)
    return None if getattr(answer.func, "__name__", "") == "__setitem__" else args[0]


def _fresh(value: Any) -> Any:
    """A copy, which nobody has written into and of which nobody knows what a micro-batch has of it."""
    return map_tensors(torch.clone, value)


def target_of(func: Any, args: Any) -> Tensor | None:
    """What a function changes in place, by its name.

    Args:
        func: The function.
        args: Its arguments.
    """
    name = getattr(func, "__name__", "")
    writes = name in ("__setitem__", "__set__") or name.startswith("__i") or (
        name.endswith("_") and not name.endswith("__")
    )  # fmt: skip
    is_type = name in ("__index__", "__int__", "__invert__", "__iter__")
    return args[0] if writes and not is_type and args and isinstance(args[0], Tensor) else None


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
