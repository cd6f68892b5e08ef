"""What a number that a micro-batch's step works out is worth in the step of the whole batch.

A loss is a sum over samples, divided by something: samples, tokens that are not masked, weights of classes.
One device divides by what it finds in the whole batch, a micro-batch by what it finds in itself. Every
function between the units that takes part in such a number is seen once with the whole batch (`Observer`),
where it has the whole batch's divisor; so a term counts as its value times (divisor here / divisor there).
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.loss.bent import Bent, Leaf, bend, extreme, extremes, summed
from lightning_pipeline.model.loss.events import (
    SHAPES,
    VALUES,
    Call,
    Event,
    Form,
    Operand,
    Recipe,
    Seen,
    Share,
    Whole,
    but_the_same,
    grows,
)
from lightning_pipeline.model.loss.functions import (
    AT_LEAST,
    IN_PLACE,
    JOINING,
    LIKE,
    LINEAR,
    NORMS,
    NUMBERS,
    OF_FORM,
    SELECTING,
    SUMS,
    TAKING_ROWS,
    gives_places,
    has_mask,
    indices,
    is_square,
    order_of,
    values_in,
    written_by,
)
from lightning_pipeline.model.loss.recipes import FoundByRecipe, Recipes
from lightning_pipeline.model.loss.reductions import LOSSES, valid_targets
from lightning_pipeline.model.loss.rules import (
    FOLLOWED,
    MEANS,
    RULES,
    Step,
    are_sums,
    at_least,
    is_of_rows,
    is_own,
    linear_in,
    made_with,
    mapped,
    mean_of_picked,
    operand_of,
    renamed,
    shape_of,
    sum_of_numbers,
)
from lightning_pipeline.model.tensors import user_line


class Shares:
    """Follows the functions of one micro-batch.

    Args:
        whole: What the whole batch's step showed.
        root: The LightningModule, for messages.
        fraction: Samples of this micro-batch over those of the batch.

    Attributes:
        strayed: The line from where on the micro-batch went another way than the batch; "" after a unit.
        line: The last such line, in words for a message.
        taken: The functions that were called.
        flags: What the step was told by numbers of tensors that it decides by.
        differs: Whether a number between units is another one in the whole batch, or may be in another one.
        means: Lines of means over all values, with how many these are here and in the whole batch, where
            values decide how much units return.
    """

    def __init__(self, whole: Whole, root: nn.Module, fraction: float, *, by_values: bool = False) -> None:
        self.fraction, self.strayed, self.line = fraction, "", "its last layer"
        self.recipes, self._found = Recipes([]), FoundByRecipe()
        self._recipe: Recipe = None  # what the call that runs makes
        self.whole, self.root = whole, root
        self.taken: list[Any] = []
        self.flags: list[bool] = []
        self.means, self._by_values = list[tuple[str, float, float]](), by_values
        self.differs, self.remembered = False, whole.remembered
        self._events: Iterator[tuple[int, Event]] = enumerate(whole.events.get(None, ()))
        self._after: Call = None
        self._computed: list[tuple[Any, str, Tensor]] = []
        self._calls: Iterator[tuple[int, Seen]] | None = enumerate(whole.calls.after(None))
        self.place: tuple[Any, ...] = ()
        self._mean: Bent | None = None  # of the function that runs
        self._is_summed = False  # whether that adds numbers, whatever the whole batch's step does
        self._reads, self._passed = 0, False
        self._entered, self._made, self._unmade = set[Call](), set[Any](), list[Any]()
        self._known: dict[int, tuple[Any, Share]] = {}  # with what it is of, so that no identity comes twice
        self._bent: dict[int, tuple[Any, Bent]] = {}
        self._of_all: dict[int, Tensor] = {}  # values for each sample in which a number of all of them is
        self._now: Seen | None = None  # the call that runs, in the whole batch
        self._norms: dict[int, Tensor] = {}  # the roots of sums of squares over samples
        self._places: dict[int, Tensor] = {}  # of what a mask picks
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # with the places that were written last

    def unit(self, number: int, nth: int) -> None:
        """A unit was called."""
        self._entered.add(self._after)
        self._found.begin()
        self._after = (number, nth)
        self._events, self.strayed = enumerate(self.whole.events.get(self._after, ())), ""
        self._calls = enumerate(self.whole.calls.after(self._after))

    def of(self, value: Any) -> Share | None:
        """The share of a tensor, or of the float that `item()` made of one; None where nothing is known."""
        found = self._known.get(id(value))
        return None if found is None else found[1]

    def bent(self, value: Any) -> Bent | None:
        """How a number is made of others, where that is no sum over samples."""
        found = self._bent.get(id(value))
        return None if found is None else found[1]

    def know(self, value: Any, bent: Bent) -> None:
        """A value comes from elsewhere."""
        self._bent[id(value)] = value, bent

    def may_be_another(self, value: Any, *, followed: bool = False) -> bool:
        """Whether the whole batch's step may make more of a value, and this one has gone another way.

        Args:
            value: The value.
            followed: Whether that is asked of sums alone, of which the functions that add them up are known.
        """
        is_found, theirs = self._found.made(value, followed=followed), self.whole.returned
        return is_found and (theirs is None or self.recipes.of(value) != theirs)

    def forget(self) -> None:
        """Let go of every value: its memory is the backward's to free."""
        self._known.clear()
        self.recipes.forget()
        self._found.forget()
        self._bent.clear()
        self._tables.clear()
        self._norms.clear()
        self._of_all.clear()
        self._places.clear()
        self._computed.clear()

    def counted(self, mine: float, whole: float) -> None:
        """A mean was taken of so many values, and of so many in the whole batch."""
        if self._by_values:
            self.means.append((user_line(self.root), mine, whole))

    def multiplied(self, result: Tensor, number: Tensor) -> None:
        """A mean was multiplied with a number that a unit computed."""
        if result.grad_fn is not None:
            self._computed.append((result.grad_fn, user_line(self.root), number.detach()))

    def computed_in(self, loss: Tensor) -> list[tuple[str, Tensor]]:
        """Such numbers that a loss is made of, and the lines; those of what is only logged do not count."""
        pending, seen = [loss.grad_fn] if self._computed else [], set[Any]()
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen.add(node)
                pending.extend(before for before, _ in node.next_functions)
        return [(line, number) for node, line, number in self._computed if node in seen]

    def is_mean(self, share: Share) -> bool:
        """Whether it is nothing but the value by the number of samples."""
        if share.lost:
            return share.origin == SHAPES
        if share.apart or len(share.terms) != 1:
            return False
        return math.isclose(share.terms[0][0], self.fraction, rel_tol=1e-12)

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Run a function, and find the share of what it returns."""
        return self.recipes.run(
            func, args, kwargs, lambda recipe: self._called(func, args, kwargs, recipe, run)
        )

    def _called(self, func: Any, args: Any, kwargs: Any, recipe: Recipe, run: Callable[..., Any]) -> Any:
        self._recipe = recipe
        if func in LIKE:  # such as `mask.type_as(loss)`, in which no loss is
            args = (*args[:1], *(one.detach() if isinstance(one, Tensor) else one for one in args[1:]))
        result = self._shared(func, args, kwargs, run)
        self._found.note(func, args, kwargs, result)
        if type(result) is bool:
            self.flags.append(result)
        self._note_places(func, args, kwargs, result)
        if isinstance(result, Tensor) and result.dim() and func not in OF_FORM:
            self._note_of_all(args, kwargs, result)
        return result

    def is_of_all(self, value: Any) -> bool:
        """Whether a tensor has a value for each sample in which a number of all of them is."""
        return id(value) in self._of_all

    def _note_of_all(self, args: Any, kwargs: Any, result: Tensor) -> None:
        if self._now is not None and self._now.result == tuple(result.shape):
            return  # it has no samples
        given = [value for value in values_in(args, kwargs) if isinstance(value, Tensor | float)]
        shares = (self.of(value) for value in given)
        numbers = any(share is not None and share.single for share in shares)
        if numbers or any(id(one) in self._of_all or self.bent(one) is not None for one in (*given, result)):
            self._of_all[id(result)] = result

    def _shared(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        if func in FOLLOWED:
            self.taken.append((func, kwargs.get("reduction")))
        seen = self._now = self._seen(func)
        if self._picks(func, args, kwargs, seen):
            share = self.of(args[0])
            by_batch = any(self.bent(arg) is not None for arg in (args[0], *indices(args[1])))
            if not by_batch and (share is None or not share.single):
                return self._select(func, args, kwargs, run)
        if self._is_own_rows(func, args):
            return self._followed(func, args, kwargs, run, seen)
        for table in written_by(func, args, kwargs) if self._tables else ():
            self._tables.pop(id(table), None)
        makes = func not in OF_FORM  # such as zeros, which are the same for any batch
        bent = bend(self, func, args, kwargs, seen) if makes else None  # before it runs, maybe in place
        self._mean, self._is_summed = None, False
        result = self._followed(func, args, kwargs, run, seen)
        bent = None if self._is_summed else bent if bent is not None and bent.always else self._mean or bent
        if self._is_sum_of_powers(func, args, kwargs, result, seen):
            self._keep_bent(result, None)
            return result
        if isinstance(result, tuple):
            found = extremes(self, func, args, kwargs, result, seen)
            for one, made in zip(result, found, strict=False):
                self._keep_bent(one, made)
            return result
        made = args[0] if func is Tensor.__setitem__ else result
        if func is Tensor.__setitem__ and isinstance(made, Tensor):
            self._note_table(made, args[1], seen)
        self._keep_bent(made, bent or extreme(self, func, args, kwargs, made, seen))
        return result

    def _is_sum_of_powers(self, func: Any, args: Any, kwargs: Any, result: Any, seen: Seen | None) -> bool:
        """Whether a norm over samples is a sum of theirs, or its square is; the share of one is kept."""
        if not args:
            return False
        if func in NORMS:
            order, value = order_of(func, args, kwargs), args[0]
            if self.bent(value) is not None or not self._is_of_samples(value, seen):
                return False
            if order == 2:
                self._norms[id(result)] = result
            if order != 1:
                return False
        elif not self._norms or not is_square(func, args) or id(args[0]) not in self._norms:
            return False
        self._keep(result, Share(((1.0, result),), SHAPES, single=True))
        return True

    def _is_of_samples(self, value: Tensor, seen: Seen | None) -> bool:
        """Whether a tensor has nothing but elements of this micro-batch's samples, each as it stands."""
        share = self.of(value)
        if share is not None or self.is_of_all(value):
            return share is not None and is_of_rows(share, value)
        return bool(grows(seen, 0, value)) and self.counts(value, seen)

    def _picks(self, func: Any, args: Any, kwargs: Any, seen: Seen | None) -> bool:
        """Whether values decide which samples are taken, and not which of what has none, such as a weight."""
        if func is Tensor.__getitem__:
            places = but_the_same(indices(args[1]), seen)
            listed = isinstance(args[1], list) and self.whole.reads  # such as what `mask.tolist()` says
            picks = has_mask(places) or (listed and bool(grows(seen, 0, args[0])))
        elif func in TAKING_ROWS:
            places, picks = (*args[2:], *kwargs.values()), False
        else:
            return func in SELECTING and not self._has_no_samples(args[0], seen)
        picks = picks or any(id(place) in self._places for place in places)
        return picks and not self._has_no_samples(args[0], seen)

    def _has_no_samples(self, value: Tensor, seen: Seen | None) -> bool:
        return self.of(value) is None and self.bent(value) is None and grows(seen, 0, value) is False

    def _note_places(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """What holds in a mask stands there, and what is made of such places is their part."""
        if gives_places(func, args, kwargs) or (args and id(args[0]) in self._places):
            made = result if isinstance(result, tuple | list) else (result,)
            self._places.update(
                (id(one), one) for one in made if isinstance(one, Tensor) and one.dtype is torch.int64
            )

    def _seen(self, func: Any) -> Seen | None:
        """The call in the whole batch's step; None from where on this one went another way."""
        index, seen = (0, None) if self._calls is None else next(self._calls, (0, None))
        self.place = "call", self._after, index
        if seen is not None and seen.func != func and are_sums(func, seen.func):
            return None
        if seen is None or seen.func != func:  # what reads an attribute is made anew each time
            self._calls, made = None, self.whole.calls.that_makes(self._recipe)
            self._found.call(made)
            return made
        return seen

    def _note_table(self, table: Tensor, index: Any, seen: Seen | None) -> None:
        """Rows were written: of the samples, where each has a place of its own in the whole batch."""
        theirs = None if seen is None else seen.args[1]
        whole = theirs.value if isinstance(theirs, Form) else None
        apart = whole is not None and whole.dtype is torch.int64 and whole.unique().numel() == whole.numel()
        if apart and isinstance(index, Tensor) and index.dim() == 1 and grows(seen, 1, index):
            self._tables[id(table)] = table, index.detach().clone()

    def _is_own_rows(self, func: Any, args: Any) -> bool:
        """Whether a sample reads of a table what it has written there itself."""
        if func is not Tensor.__getitem__ or id(args[0]) not in self._tables:
            return False
        places = self._tables[id(args[0])][1]
        return isinstance(args[1], Tensor) and args[1].dtype == places.dtype and torch.equal(args[1], places)

    @property
    def is_astray(self) -> bool:
        """Whether the whole batch's step does not show what this one calls, or how large it is."""
        return self._calls is None or self.whole.ragged

    def counts(self, value: Tensor, seen: Seen | None) -> bool:
        """Whether a tensor has the micro-batch's part of the elements that the whole batch's has."""
        theirs = None if seen is None else seen.args[0]
        if not isinstance(theirs, Form) or theirs.guessed:
            return False
        return math.isclose(value.numel(), self.fraction * math.prod(theirs.shape), rel_tol=1e-9)

    def _followed(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any], seen: Seen | None) -> Any:
        if func not in RULES:
            return self._other(func, args, kwargs, run, seen) if self._known else run(func, args, kwargs)
        place, event = self._take(func, args, kwargs)
        known = [self.of(arg) for arg in args[:2]]
        operands = tuple(operand_of(arg) for arg in args[:2])
        before = args[0]
        if func in IN_PLACE and isinstance(before, Tensor) and before.numel() == 1:
            before = before.clone()
            known[0] = renamed(known[0], args[0], before)
        if event is None:
            result = run(func, args, kwargs)
            given = (before, *args[1:])
            summed = None if self.strayed else sum_of_numbers(func, given, kwargs, result, known)
            self._is_summed = summed is not None
            found = summed or mean_of_picked(self, func, args, result, known[0])
            self._keep(result, found or self.lost(*known))
            return result
        event = self._compared(event, operands, args, place)
        if (position := linear_in(self, func, args, kwargs, seen)) is not None:
            result = run(func, args, kwargs)
            self._keep_each(func, args, kwargs, position, result)
            return result
        count = valid_targets(func, args, kwargs) if func in LOSSES and event.divisor is not None else None
        result = run(func, args, kwargs)
        if isinstance(result, Tensor):
            mine = Event(func, operands, shape_of(result), count)
            step = Step(self, mine, event, (before, *args[1:]), kwargs, result, known, self.whole)
            share = step.lost(always=True) if step.has_guessed_number else RULES[func](step)
            if share is not None:
                share = share._replace(single=not step.grows, picked=step.is_of_picked)
            self._keep(result, share)
        return result

    def number(self, mine: float, theirs: float, place: tuple[Any, ...]) -> float:
        """The whole batch's number, where the micro-batch has its own.

        One of a batch before tells which are counts of samples; the others are the same for both.

        Args:
            mine: The micro-batch's.
            theirs: That of the whole batch that was seen.
            place: In the step.
        """
        counted = math.isclose(mine, theirs * self.fraction, rel_tol=1e-12)
        if self.whole.remembered:
            if place not in self.whole.sized:
                return mine
            return theirs if counted else mine / self.fraction
        if mine != theirs and counted and not self.whole.reads:
            self.whole.sized.add(place)
        else:
            self.differs |= mine != theirs
        return theirs

    def _compared(
        self, event: Event, operands: tuple[Operand, ...], args: Any, place: tuple[Any, ...]
    ) -> Event:
        """What the whole batch's step was given; of one before, with the numbers of this one."""
        found = list(event.operands)
        for position, (mine, theirs) in enumerate(zip(operands, event.operands, strict=False)):
            plain = not isinstance(args[position], Tensor) and not theirs.guessed
            if plain and isinstance(mine.value, int | float) and isinstance(theirs.value, int | float):
                number = self.number(mine.value, theirs.value, (*place, position))
                found[position] = theirs._replace(value=number)
            elif plain:
                self.differs |= mine.value is not theirs.value
        return event._replace(operands=tuple(found))

    def _take(self, func: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], Event | None]:
        if not self.strayed:
            index, event = next(self._events, (0, None))
            divides = func in MEANS or (func in LOSSES and kwargs.get("reduction", "mean") == "mean")
            while divides and not self._calls and event is not None and self._is_other(event, func, args):
                index, event = next(self._events, (0, None))
            while event is not None and event.func in SUMS and func not in SUMS and self._has_passed_units:
                self._passed, (index, event) = True, next(self._events, (0, None))
            if event is not None and event.func is func:
                return ("event", self._after, index), event
            if are_sums(func, func if event is None else event.func):
                return (), None
            place = self._passed_over(func) if event is None else None
            if place is not None:
                return ("event", *place), self.whole.events[place[0]][place[1]]
            self.strayed = self.line = user_line(self.root)
        event = self.whole.made.get(self._recipe)
        self._found.call(event, followed=True)
        return ("made", self._recipe), event

    def _is_other(self, event: Event, func: Any, args: Any) -> bool:
        """Whether a call of this function in the whole batch's step was of other values than this one.

        The micro-batch has gone another way since the last unit, so that it may be another call.
        """
        pairs = zip(args, event.operands, strict=False)
        shapes = [(arg.shape, whole.shape) for arg, whole in pairs if isinstance(arg, Tensor)]
        return event.func is func and not all(
            own == whole or math.isclose(math.prod(own), self.fraction * math.prod(whole), rel_tol=1e-9)
            for own, whole in shapes
        )

    @property
    def _has_passed_units(self) -> bool:
        """Whether the whole batch's step has called others up to here, and has more to add up."""
        before = takewhile(lambda after: after != self._after, self.whole.events)
        return not self._entered.issuperset(before)

    def _passed_over(self, func: Any) -> tuple[Call, int] | None:
        """The place of a call after units that this micro-batch does not call, such as those of a task.

        It is the only one of its function there, or nobody knows which.
        """
        segments = list(self.whole.events)
        later = segments[segments.index(self._after) + 1 :] if self._after in self.whole.events else []
        places = [(after, index) for after in later for index in range(len(self.whole.events[after]))]
        found = [
            at for at, (after, index) in enumerate(places) if self.whole.events[after][index].func is func
        ]
        if len(found) != 1:
            return None
        self._after = after = places[found[0]][0]
        self._events = enumerate(self.whole.events[after])
        for index, _ in self._events:
            if index == places[found[0]][1]:
                break
        self._passed = True
        return places[found[0]]

    def end(self) -> None:
        """The loss was made."""
        self._entered.add(self._after)
        self._unmade = [] if self.strayed else [event.func for _, event in self._events]
        events = self.whole.events.get(self._after, ())
        self._made = {event.func for event in events[: len(events) - len(self._unmade)]}

    @property
    def ends_early(self) -> bool:
        """After `end`: whether a call that came after what was passed over was another than thought."""
        return self._passed and bool(self._unmade)

    @property
    def makes_less(self) -> bool:
        """After `end`: whether the whole batch's step calls more.

        That is neither a sum of what passed units give nor one more turn of a loop over samples.
        """
        passes = not self._entered.issuperset(self.whole.events)
        known = self._made | SUMS if passes else self._made
        return not known.issuperset(self._unmade)

    def _select(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """A mask picks samples, and may by chance pick as many as in the whole batch."""
        share = self.of(args[0])
        result = run(func, args, kwargs)
        if share is None or share.lost:
            self._keep(result, share or Share(((1.0, result),), VALUES, picked=True))
        else:
            picked = mapped(share, args[0], result, lambda t: func(t, *args[1:], **kwargs))
            self._keep(result, picked._replace(picked=True))
        return result

    def _other(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any], seen: Seen | None) -> Any:
        """A function without a rule: what it makes of a followed value is followed if it is linear."""
        found = [share for value in values_in(args, kwargs) if (share := self.of(value)) is not None]
        result = run(func, args, kwargs)
        if not found or func in OF_FORM:
            return result
        if func in NUMBERS:
            self._reads += 1
            made_up = seen is not None and isinstance(seen.args[0], Form) and seen.args[0].computed
            number = found[0]._replace(read=self._reads, made_up=made_up)
            self._keep(result, number if isinstance(result, float) else None)
        elif func in LINEAR and isinstance(result, Tensor) and (own := self.of(args[0])) is not None:
            self._keep(result, mapped(own, args[0], result, lambda t: func(t, *args[1:], **kwargs)))
        elif (position := linear_in(self, func, args, kwargs, seen)) is not None:
            self._keep_each(func, args, kwargs, position, result)
        elif func in JOINING:
            self._keep(result, self._joined(func, args, kwargs, result))
        elif isinstance(result, Tensor) and self._is_of_each(args, result):
            self._keep(result, Share(((1.0, result),), VALUES, picked=True))
        elif isinstance(result, Tensor) and (result.is_floating_point() or func in AT_LEAST):
            lost, own = self.lost(*found), self.of(args[0]) if func in AT_LEAST else None
            floor = None if own is None or lost is None else at_least(func, args, kwargs, own)
            self._keep(result, lost if lost is None else lost._replace(floor=floor))
        return result

    def _keep_each(self, func: Any, args: Any, kwargs: Any, position: int, result: Any) -> None:
        """Of a linear function of one argument: all that it gives."""
        share, several = self._known[id(args[position])][1], isinstance(result, tuple | list)
        for nth, one in enumerate(result if several else (result,)):
            change = partial(made_with, func, args, kwargs, position, nth if several else None)
            self._keep(one, mapped(share, args[position], one, change))

    def _is_of_each(self, args: Any, result: Tensor) -> bool:
        """Whether there is a row for each of the samples that a mask picked."""
        shares = [(arg, self.of(arg)) for arg in args if isinstance(arg, Tensor)]
        picked = [(arg, share) for arg, share in shares if share is not None]
        return bool(picked) and all(
            is_of_rows(share, arg) and result.dim() > 0 and result.shape[0] == arg.shape[0]
            for arg, share in picked
        )

    def mean_of(self, result: Tensor, count: float | Tensor) -> None:
        """The function that runs takes a mean of as many values as nobody knows of the whole batch."""
        number = torch.as_tensor(count, dtype=torch.float64, device=result.device)
        total = torch.where(number == 0, 0.0, result.detach().double() * number)
        self._mean = Bent(torch.div, (Leaf(total, summed), Leaf(number, summed)), always=True)

    def _joined(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Share | None:
        """Several numbers as one tensor: each has its place, and nothing in the others'."""
        parts = list(args[0])
        shares = [self.of(part) or Share(((self.fraction, part),), single=True) for part in parts]
        along_rows = not (kwargs.get("dim") or (args[1:] and args[1]))
        if func is torch.cat and along_rows and all(map(is_of_rows, shares, parts)):
            return Share(((1.0, result),), VALUES, picked=True)
        if any(share.lost for share in shares) or any(part.numel() != 1 for part in parts):
            return self.lost(*shares)
        terms = [
            (factor, func([*zeros[:i], tensor, *zeros[i + 1 :]], *args[1:], **kwargs))
            for zeros in [[torch.zeros_like(part) for part in parts]]
            for i, share in enumerate(shares)
            for factor, tensor in share.terms
        ]
        own = all(map(is_own, shares, parts))  # else the result may be nan where the terms are not
        if own and len({factor for factor, _ in terms}) == 1:
            terms = [(terms[0][0], result)]
        single = all(share.single for share in shares)
        return Share(tuple(terms), max(share.origin for share in shares), single=single)

    def lost(self, *shares: Share | None) -> Share | None:
        """The share of what is made of these in a way that is not followed."""
        worst = [share for share in shares if share is not None and not self.is_mean(share)]
        if not worst:
            return None
        return Share(
            (),
            max(share.origin for share in worst),
            next((s.lost for s in worst if s.lost), "") or user_line(self.root),
        )

    def _keep_bent(self, result: Any, bent: Bent | None) -> None:
        """Note how a result is made, where no share says it."""
        if not isinstance(result, Tensor | float):
            return
        share = self.of(result)
        if bent is not None and (bent.always or share is None or share.lost):
            self._bent[id(result)] = result, bent
        else:
            self._bent.pop(id(result), None)

    def _keep(self, value: Any, share: Share | None) -> None:
        if share is not None:
            apart = not is_own(share, value) if isinstance(value, Tensor) else share.apart
            self._known[id(value)] = (value, share._replace(apart=apart))
        else:
            self._known.pop(id(value), None)
