"""What the whole batch's step does between units, seen once for all of its micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.loss.events import Call, Event, Guess, Operand, Recipe, Whole
from lightning_pipeline.model.loss.functions import (
    ARRAYS,
    BY_VALUES,
    READING,
    REPEATING,
    SELECTING,
    TAKING,
    as_indices,
    gives_places,
    has_mask,
    written_by,
)
from lightning_pipeline.model.loss.recipes import Recipes
from lightning_pipeline.model.loss.reductions import LOSSES, reduction_of, valid_targets
from lightning_pipeline.model.loss.rules import RULED, operand_of, shape_of
from lightning_pipeline.model.random import Draws, JoinedDraws, Kinds
from lightning_pipeline.model.tensors import is_placeholder, storage_key, tensors_in


class Observer:
    """Sees the functions of one run of a step over the whole batch.

    Args:
        batch: Its tensors.
        guess: What the step is told of values that no unit has computed.
    """

    def __init__(self, batch: Sequence[Tensor], guess: Guess | None = None) -> None:
        self.whole, self.guess = Whole(), guess or Guess(0.5, 1.0)
        self._batch = {storage_key(tensor): position for position, tensor in enumerate(batch)}
        self._copies: list[Tensor] = []  # held, so that no memory is used twice
        self._after: Call = None
        self.recipes = Recipes(self.whole.held)

    def unit(self, number: int, nth: int) -> None:
        """A unit was called."""
        self._after = (number, nth)

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Run a function and note what it was given."""

        def noted(recipe: Recipe) -> Any:
            return self.whole.calls.run(
                self._after, func, args, kwargs, recipe,
                lambda: self._observed(func, args, kwargs, recipe, run),
            )  # fmt: skip

        return self.recipes.run(func, args, kwargs, noted)

    def returned(self, result: Any) -> None:
        """The step has returned."""
        self.whole.is_at_end = True
        loss = result.get("loss") if isinstance(result, dict) else result
        self.whole.returned = self.recipes.of(loss) if isinstance(loss, Tensor) else None

    def _observed(self, func: Any, args: Any, kwargs: Any, recipe: Recipe, run: Callable[..., Any]) -> Any:
        if func in ARRAYS and is_placeholder(args[0]):
            self.guess.made = True
            made = torch.full(args[0].shape, self.guess.number, dtype=args[0].dtype)
            return made.numpy()
        for written in written_by(func, args, kwargs):
            self._batch.pop(storage_key(written), None)
        if func is Tensor.__getitem__ and has_mask(args[1]):
            self.whole.ragged = True
            args = (args[0], as_indices(args[1])) if is_placeholder(args[0]) else args
        elif func in SELECTING and is_placeholder(args[0]) and not is_placeholder(args[1]):
            self.whole.ragged = True
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            func, args = Tensor.__getitem__, (args[0].expand(shape), as_indices(args[1].expand(shape)))
        elif (func in BY_VALUES or gives_places(func, args, kwargs)) or (
            func in REPEATING and any(map(is_placeholder, (*args[1:], *kwargs.values())))
        ):
            self.whole.ragged = True
        elif func in READING and not is_placeholder(args[0]):
            self.whole.reads = True
        if func not in RULED:
            return self._copied(func, args, kwargs, run(func, args, kwargs))
        operands = tuple(operand_of(arg, copied=True) for arg in args[:2])
        count = valid_targets(func, args, kwargs) if func in LOSSES else None
        if count is not None:
            self.whole.targets.append(self._place(func, args, kwargs))
        result = run(func, args, kwargs)
        event = Event(func, operands, shape_of(result), count)
        self.whole.events.setdefault(self._after, []).append(event)
        if recipe is not None:
            self.whole.made[recipe] = event
        return result

    def _copied(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Note which tensor of the batch a copy's values are of, as `labels[:, 1:].flatten()` makes one."""
        if func in TAKING and isinstance(result, Tensor) and not is_placeholder(result):
            position = self._batch.get(storage_key(args[0])) if isinstance(args[0], Tensor) else None
            if position is not None and result.dtype == args[0].dtype:
                self._batch[storage_key(result)] = position
                self._copies.append(result)
        return result

    def _place(self, func: Any, args: Any, kwargs: Any) -> tuple[int, int] | None:
        call = reduction_of(func, args, kwargs)
        position = self._batch.get(storage_key(call.target))
        return None if position is None or call.weight is not None else (position, call.ignore_index)


def told_apart(whole: Whole, other: Whole) -> None:
    """Mark what goes by what was made up for values of units: it is another where something else was.

    Args:
        whole: Of a run of the step; changed.
        other: Of a run of it with another `Guess`.
    """
    whole.calls.apart_from(other.calls)
    for after, events in whole.events.items():
        theirs = other.events.get(after, [])
        alike = 0
        while alike < min(len(events), len(theirs)) and events[alike].func == theirs[alike].func:
            alike += 1
        whole.events[after] = [_marked(*pair) for pair in zip(events[:alike], theirs, strict=False)]
    both = whole.made.keys() & other.made.keys()
    whole.made = {recipe: _marked(whole.made[recipe], other.made[recipe]) for recipe in both}
    whole.returned = whole.returned if whole.returned == other.returned else None


def _marked(mine: Event, theirs: Event) -> Event:
    pairs = list(zip(mine.operands, theirs.operands, strict=False))
    divisor = mine.divisor if _same(mine.divisor, theirs.divisor) else None
    return mine._replace(operands=tuple(_told(*pair) for pair in pairs), divisor=divisor)


def _told(mine: Operand, theirs: Operand) -> Operand:
    same = mine.shape == theirs.shape and _same(mine.value, theirs.value)
    return mine if same else Operand(mine.shape, None, mine.computed, guessed=True)


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))


Run = Callable[[Any, int, Observer, Draws], None]


def rehearsed(
    whole: Any, microbatches: Sequence[Any], run: Run, observer: Callable[[], Observer]
) -> list[Whole]:
    """What a step divides by in the whole batch, for each micro-batch.

    Args:
        whole: Its arguments.
        microbatches: Arguments for each.
        run: Rehearses the step with some of these arguments, the seeds of a micro-batch, somebody who sees
            the functions and somebody who sees the draws.
        observer: Makes the former.
    """
    seen, draws = observer(), Draws()
    run(whole, 0, seen, draws)
    if not draws.any:
        return [seen.whole] * len(microbatches)
    parts = [Draws() for _ in microbatches]
    for number, microbatch in enumerate(microbatches):
        run(microbatch, number, observer(), parts[number])
    firsts = [
        [tensor.shape[0] for tensor in tensors_in(one) if tensor.dim()] for one in (whole, *microbatches)
    ]
    kinds: Kinds = frozenset(zip(*firsts, strict=False))
    wholes: list[Whole] = []
    for number in range(len(microbatches)):
        seen, joined = observer(), JoinedDraws(parts, number, kinds)
        run(whole, number, seen, joined)
        seen.whole.unclear = joined.unclear()
        wholes.append(seen.whole)
        if not joined.once:
            return wholes * len(microbatches)
    return wholes
