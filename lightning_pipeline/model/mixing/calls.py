"""What a run of a step calls between its units, in order: functions of the batch, and what they give."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.model.mixing.meetings import is_set
from lightning_pipeline.model.mixing.picked import COUNTS, Picked
from lightning_pipeline.model.mixing.positions import lengths
from lightning_pipeline.model.mixing.standing import standing_of, trained_in
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.tensors import is_placeholder, map_tensors, storage_key, tensors_in, user_line

Run = Callable[..., Any]
"""Runs a function: it, arguments, keyword arguments, and what answers in its place."""
NUMBERS = frozenset(
    {Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.is_nonzero}
)
ARRAYS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})
_NUMBER = bool | int | float | complex
FORM = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__",
    "__get__", "get_device", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_same_size",
})  # fmt: skip
"""Functions that tell of a tensor what follows from its form, and not from its values."""


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
        counts: Whether it told how many samples a mask picked, or as many as values say.
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
    counts: bool = False
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

    def leaves(self, root: nn.Module) -> None:
        """The step is over, and leaves the LightningModule as it stands."""

    def end(self, result: Any) -> None:
        """The step has returned this."""


class Seen(Functions):
    """One run of a step, as it is.

    Args:
        elsewhere: Parameters and buffers that some ranks do not have.
        whole: A run for the batch, whose numbers this one for a micro-batch reads.
        root: The LightningModule, where lines are to be noted.
        also: What it reads of that run beside numbers: `ARRAYS`, lists of numbers among them, or `COUNTS` of
            samples that were picked.

    Attributes:
        calls: Of functions and units, in order.
        lines: Of each of them.
        host: Where numpy's and Python's generators stood at the first unit.
        returns_more: Whether the step returned something beside its loss.
        left: Which parameters are trained when the step is over; empty where it ends before.
    """

    def __init__(
        self, elsewhere: Iterable[Tensor] = (), whole: "Seen | None" = None, root: nn.Module | None = None,
        *, also: frozenset[Any] = frozenset(),
    ) -> None:  # fmt: skip
        self._asked = NUMBERS | also
        self.calls: list[Called] = []
        self.lines: list[str] = []
        self._root = root
        self.host: int | None = None
        self._standing: Hashable = None
        self.returns_more = self.ended = False
        self.left: tuple[bool, ...] = ()
        self._whole: list[Called] = [] if whole is None else whole.calls
        self._elsewhere = {id(one): one for one in elsewhere}
        """These and what is made of them, which ranks may know or not."""
        self._picked = Picked()
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

    @property
    def keys(self) -> list[Hashable]:
        """Equal for two runs that may do the same."""
        return [one.key for one in self.calls]

    def asks(self) -> list[frozenset[Any]]:
        """What another run may read of this one beside numbers, one after the other."""
        counts = [COUNTS] if any(one.counts for one in self.calls) else []
        return [frozenset(), *counts, ARRAYS]

    def is_made_here(self, value: Any) -> bool:
        """Whether a tensor that the step has left follows from the batch alone: no unit has a part in it."""
        plain = isinstance(value, Tensor) and not (value.requires_grad or is_placeholder(value))
        return plain and id(value) not in self._elsewhere and not any(call.reads for call in self.calls)

    def stands(self, module: nn.Module) -> None:
        """This unit is about to be called."""
        self._standing = standing_of(module)

    def leaves(self, root: nn.Module) -> None:
        """The step is over."""
        self.left = trained_in(root)

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
        given, counts = list(tensors_in((args, kwargs))), self._picked.counts(func, args)
        answer = self._of_whole(func, counts=counts)
        result = run(func, args, kwargs) if answer is None else fresh(answer.result)
        target = target_of(func, args)
        opaque = any(one.requires_grad or is_placeholder(one) for one in tensors_in((args, kwargs, result)))
        of_units = opaque or any(id(one) in self._elsewhere for one in given)
        if target is not None and not opaque:
            if target._base is not None or storage_key(target) in self._shared:
                opaque = True  # another tensor is written, too
        elif not opaque:
            self._note_memory(args, result)
        opaque = (opaque or of_units) and not counts  # how many there are is a number of the batch
        kept = None if opaque else map_tensors(lambda one: one.detach().clone(), result)
        written = None if target is None or opaque else target.detach().clone()
        is_given = target is None and isinstance(result, Tensor) and any(result is arg for arg in args)
        if opaque:
            self._elsewhere.update((id(one), one) for one in tensors_in(result))
        if of_units and target is not None:
            self._elsewhere.update((id(one), one) for one in (target, target._base) if one is not None)
        reads = opaque and isinstance(result, _NUMBER | list) and getattr(func, "__name__", "") not in FORM
        numbers, picked = lengths(func, args, kwargs), self._picked.note(func, args, kwargs, result)
        asked = answer is not None and func in NUMBERS
        read = args[0].detach().clone() if asked else None
        by_batch = any(id(one) in self._of_batch for one in given)
        if by_batch:
            made = [*tensors_in(result), *(() if target is None else (target,))]
            self._of_batch.update((id(one), one) for one in made)
        is_read = by_batch and not opaque and func in NUMBERS
        self._note(
            Called(func, kept, written, opaque, is_given, numbers, reads, picked, read, is_read, counts)
        )
        return result

    def _of_whole(self, func: Any, *, counts: bool) -> Called | None:
        """The call that reads this number, or makes a set of values, in the run for the batch."""
        place = len(self.calls)
        if (
            not (is_set(func) or (func in self._asked and (counts or func not in COUNTS)))
            or place >= len(self._whole)
            or self._whole[place].func != func
        ):
            return None
        return None if self._whole[place].opaque else self._whole[place]

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
    theirs, mine, same = (run.keys for run in (whole, own, given))
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


def fresh(value: Any) -> Any:
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
