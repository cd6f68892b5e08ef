"""What a step leaves behind: every micro-batch begins as the batch did, and the results are merged."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_pipeline.model.loss import Part
from lightning_pipeline.model.places import (
    MISSING,
    Effect,
    Flags,
    Guard,
    Kept,
    Owner,
    Place,
    Replayed,
    TensorOwner,
)
from lightning_pipeline.model.rules import (
    CHAINED,
    Gathered,
    Merge,
    NoFit,
    Rows,
    Rule,
    at_end,
    equal,
    largest,
    own_containers,
    smallest,
    usual,
)
from lightning_pipeline.model.state.elsewhere import Unmerged, attribute_name
from lightning_pipeline.model.state.number_parts import NumberParts
from lightning_pipeline.model.state.retained import Retained, give_gradients
from lightning_pipeline.model.state.sent import (
    MOST_COMPARED,
    FromLast,
    Gradients,
    Sent,
    added_to,
    fill,
    is_small,
    leaves_compared,
    let_make,
    travels,
)
from lightning_pipeline.model.tensors import is_placeholder, map_tensors, set_values

_FILLED = (list, dict, set, deque)


class StepState:
    """Follows the effects of one batch on one rank.

    Args:
        effects: Of the step.
        rules: For the places, by label; `CHAINED` for those that no rule puts together.
        sizes: Samples of each micro-batch.
        is_last: Whether this rank holds the last stage.
        step: Name of the step.
        beside: What another step has left by rows, which this one may read.
        in_unit: Whether a unit leaves it, whose next forward reads it.
        left: What the batch leaves, by label, where a run for it as one has shown that.
        part_of: What a number of the micro-batch that runs is of the batch's.

    Attributes:
        unfit: After `settle`, labels of what a unit leaves and no rule puts together.
        gathered: What units give to micro-batches, where something is worked out at the end.
        work_out: Makes of that what the batch leaves, by label.
        divided: After `settle`, labels of places that some micro-batches have changed and others have not;
            for each whether the backwards have read what stood there.
        parts: What numbers that it leaves are of the batch's.
    """

    def __init__(
        self, effects: Sequence[Effect], rules: dict[str, Rule | None], sizes: Sequence[int],
        *, is_last: bool, step: str, beside: Sequence[tuple[Place, Rows]] = (),
        in_unit: bool = False, left: Mapping[str, Any] | None = None,
        part_of: Callable[[Any], Part] = lambda number: Part(),
    ) -> None:  # fmt: skip
        self._step = step
        self._effects = [e for e in effects if (is_last or not e.from_units) and not is_absent(e)]
        self._elsewhere = [e for e in effects if e not in self._effects]
        self._rules = rules
        for effect in effects:
            replay_from(effect.place)
        self._start = {e.place.label: Kept.of(e.place.get(), deep=e.deep) for e in effects}
        self._results: list[dict[str, Any]] = []
        self._written: set[str] = set()  # tensors that were to be another, and were changed in place
        self._several, self._sizes = len(sizes) > 1, list(sizes)
        self._fresh, self.divided, self.unfit = True, dict[str, bool](), list[str]()
        self._in_unit, self._left = in_unit, left or {}
        self._retaining = [effect for effect in effects if effect.retains]
        self._retained, self._microbatch = Retained(len(sizes)), 0
        self._aside: list[tuple[Place, Kept]] = []
        self.parts = NumberParts(part_of)
        self._all = list(effects)
        self._waiting = [
            e
            for e in self._effects
            if rules.get(e.place.label, usual) is at_end and e.place.label not in self._left
        ]
        self.gathered: Gathered | None = None
        self.work_out: Callable[[Gathered], Mapping[str, Any]] = lambda gathered: {}
        self._beside = [
            (place, Kept.of(value), rows)
            for place, rows in beside
            if not isinstance(value := place.get(), Guard) and value is not MISSING
        ]

    def start_again(self) -> None:
        """Before the first micro-batch, after a run of the step that none is: nothing of it is left."""
        for effect in self._all:
            self._start[effect.place.label].give_back(effect.place)

    def before(self, microbatch: int | None, *, counts: bool) -> None:
        """A replay comes: let everything be as when the batch began; what has samples is cut as the batch.

        Args:
            microbatch: Which; None: the whole batch.
            counts: Whether what it leaves is that of its micro-batch, see `after`.
        """
        self._microbatch = microbatch or 0
        chained = [] if counts else [effect for effect in self._all if self._is_chained(effect)]
        self._aside = [(e.place, Kept.of(e.place.get(), deep=e.deep)) for e in chained]
        if not self._fresh:
            for effect in self._all:
                if not self._is_chained(effect):
                    self._start[effect.place.label].give_back(effect.place)
        self._fresh = False
        if microbatch is None or not self._several:
            return
        for effect in self._all:
            rule = self._rules.get(effect.place.label)
            value = self._start[effect.place.label].value
            if isinstance(rule, Rows) and not isinstance(value, Guard) and value is not MISSING:
                cut = self._cut(rule, value, microbatch)
                effect.place.put(cut.clone() if effect.deep and cut is not value else cut)
        for place, kept, rule in self._beside:
            place.put(self._cut(rule, kept.value, microbatch))

    def _cut(self, rule: Rows, value: Any, microbatch: int) -> Any:
        begin, length = sum(self._sizes[:microbatch]), self._sizes[microbatch]
        return rule.cut(value, begin, length, sum(self._sizes))

    def after(self, *, counts: bool) -> None:
        """A replay is over.

        Args:
            counts: Whether what it left is that of its micro-batch. On a rank with several stages that of the
                last of them is; what the others left is not to be seen by anyone.
        """
        for effect in self._retaining:
            self._retained.note(effect.place.label, self._microbatch, effect.place.get())
        if counts:
            if self._several:
                self._results.append({e.place.label: self._found(e) for e in self._effects})
                left = (self._results[-1][e.place.label] for e in self._effects if e.from_units)
                self.parts.note(one.items if isinstance(one, _Grown) else one for one in left)
            self._stand_for_backward()
            return
        for effect in self._all:
            if effect.from_units or not _is_for_backward(effect):
                self._start[effect.place.label].give_back(effect.place)
        for place, kept in self._aside:
            kept.give_back(place)
        self._fresh = not any(map(_is_for_backward, self._all))
        self._stand_for_backward()

    def _stand_for_backward(self) -> None:
        """Let the backward train what it does in the batch, whatever the micro-batch has frozen."""
        for effect in self._effects:
            if effect.place.label in self._left and type(effect.place.owner) is Flags:
                self._put(effect, self._start[effect.place.label], self._left[effect.place.label])

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """After `settle`: inside, everything is as when the batch began."""
        held = [(e.place, Kept.of(e.place.get(), deep=e.deep)) for e in self._effects]
        for effect in self._effects:
            self._start[effect.place.label].give_back(effect.place)
        try:
            yield
        finally:
            for place, kept in held:
                kept.give_back(place)

    def left(self) -> dict[str, Any]:
        """By label, what is small of what stands in the places; of lists that grew, the new items."""
        found = {effect.place.label: self._small(effect) for effect in self._effects}
        return {label: value for label, value in found.items() if value is not None}

    def _small(self, effect: Effect) -> Any:
        value, before = effect.place.get(), self._list_before(effect)
        if isinstance(value, Unmerged):
            return value
        if before is not None and isinstance(value, list | deque) and _is_grown(value, before):
            value = NewItems([value[index] for index in range(len(before), len(value))])
        return (
            map_tensors(_copied, own_containers(value)) if leaves_compared(value) <= MOST_COMPARED else None
        )

    def _list_before(self, effect: Effect) -> Any:
        """What a list or deque without others in it held, that stood there when the batch began."""
        start = self._start[effect.place.label]
        own = [before for held, before in start.inner if held is start.value]
        return own[0] if own and len(start.inner) == 1 and isinstance(own[0], list | deque) else None

    def put(self, left: Mapping[str, Any]) -> None:
        """After `settle`: let this stand in the places, by label, as `left` gave it."""
        for effect in self._effects:
            if effect.place.label in left:
                value, before = left[effect.place.label], self._list_before(effect)
                if before is not None and isinstance(value, NewItems):
                    value = type(before)([*before, *value.items], *_length(before))
                self._put(effect, self._start[effect.place.label], value)

    @property
    def takes(self) -> bool:
        """Whether the step takes from an iterator."""
        return any(isinstance(effect.place.get(), Replayed) for effect in self._all)

    @property
    def waits(self) -> bool:
        """Whether something is worked out at the end of the batch; see `Gathered`."""
        return self._several and bool(self._waiting)

    def _is_chained(self, effect: Effect) -> bool:
        is_chained = self._rules.get(effect.place.label, usual) is CHAINED
        return self._several and is_chained and effect.place.label not in self._left

    def _found(self, effect: Effect) -> Any:
        """What stands in the place now, with containers of its own."""
        if self._is_chained(effect) or (effect in self._waiting and type(effect.place.owner) is not Flags):
            return None
        value, start = effect.place.get(), self._start[effect.place.label]
        if effect.deep and isinstance(value, Tensor):
            return value.detach().clone()
        if value is start.value and start.is_written:
            self._written.add(effect.place.label)
            return value.detach().clone()
        before = start.inner[0][1] if start.inner and start.inner[0][0] is value else None
        if isinstance(value, list | deque) and before is not None and _is_grown(value, before):
            new = [value[index] for index in range(len(before), len(value))]
            return _Grown(own_containers(new), _grown_inside(start))
        return own_containers(value, start.items())

    def settle(self, merge: Merge) -> None:
        """Let each place be as one device would have left it.

        Args:
            merge: Merges one value per micro-batch.
        """
        for effect in self._elsewhere:
            self._start[effect.place.label].give_back(effect.place)
        for place, kept, _ in self._beside:
            kept.give_back(place)
        if self._several and self._results:
            merge = self.parts.merging(merge)
            sizes = self._sizes[: len(self._results)]  # a micro-batch without a loss may have left nothing
            found = {**self._left, **self._worked_out()}
            for effect in self._effects:
                self._note_divided(effect)
                if effect.place.label in found:
                    self._put(effect, self._start[effect.place.label], found[effect.place.label])
                elif not self._is_chained(effect):
                    self._merge(effect, sizes, merge)

    def _worked_out(self) -> dict[str, Any]:
        gathered, self.gathered = self.gathered, None
        if gathered is None:
            return {}
        for effect in self._effects:
            if not self._is_chained(effect):
                self._start[effect.place.label].give_back(effect.place)
        found = self.work_out(gathered)
        return {effect.place.label: found[effect.place.label] for effect in self._waiting}

    def _merge(self, effect: Effect, sizes: list[int], merge: Merge) -> None:
        place, start = effect.place, self._start[effect.place.label]
        results = [found[place.label] for found in self._results]
        held = start.beside if place.label in self._written else start.tensors
        before = held[0][1] if held else start.value
        inside = start.inner and start.inner[0][0] is start.value
        if inside:
            before = start.inner[0][1]
        rule = self._rules.get(place.label, usual) or usual
        try:
            if all(isinstance(result, _Grown) for result in results):
                new = _merged(rule, [], [result.items for result in results], sizes, merge)
                _put_inside(start, [result.inside for result in results], sizes, merge)
                whole = type(before)([*before, *new], *_length(before))
            else:
                before = start.before() if inside else before
                results = [_all(before, result) for result in results]
                whole = _merged(rule, before, results, sizes, merge)
        except NoFit:
            whole = Unmerged(attribute_name(place), self._step)
            if self._in_unit:
                whole = _in_order(before, results)
                self.unfit.append(place.label)
        self._put(effect, start, whole)

    @property
    def may_be_divided(self) -> bool:
        """Whether values of units may let some micro-batches change what others do not."""
        return self._several and any(map(self._is_divided, self._effects))

    def _is_divided(self, effect: Effect) -> bool:
        """Likewise for one effect. Of what is the largest of all, some may change nothing."""
        return effect.by_value and self._rules.get(effect.place.label) not in (largest, smallest)

    def _note_divided(self, effect: Effect) -> None:
        label, start = effect.place.label, self._start[effect.place.label]
        is_known = effect not in self._waiting or type(effect.place.owner) is Flags
        if not (self._is_divided(effect) and is_known) or self._is_chained(effect):
            return
        held = start.beside if label in self._written else start.tensors
        before = held[0][1] if held else start.before()
        if len({_is_new(found[label], before) for found in self._results}) > 1:
            self.divided[label] = _is_for_backward(effect)

    def _put(self, effect: Effect, start: Kept, whole: Any) -> None:
        place = effect.place
        held = start.beside if place.label in self._written else start.tensors
        if held and isinstance(whole, Tensor):
            tensor = held[0][0]
            if place.get() is not tensor:
                place.put(tensor)
            with torch.no_grad():
                set_values(tensor, whole.to(tensor.dtype))
            if held is start.beside:
                increment_version(tensor)  # by which it is seen to be written
            return
        old = start.value
        if isinstance(old, list | dict | set | deque) and type(whole) in (type(old), list, dict, set):
            whole = _filled(old, whole)
        place.put(whole)

    # ---- what other ranks are told

    def large(self) -> list[str]:
        """On the last stage: labels of what depends on units and only ranks that read it are told."""
        return [
            effect.place.label
            for effect in self._effects
            if effect.from_units
            and not effect.deep
            and not is_small(value := effect.place.get())
            and travels(value)
        ]

    def to_share(self, read: Collection[str] = ()) -> FromLast:
        """On the last stage: what depends on units and the others are told.

        Args:
            read: Labels of large values that they read.
        """
        told = {e.place.label for e in self._effects if e.retains or isinstance(e.place.owner, TensorOwner)}
        made = self._made()
        here = {label: value for label, value in made.items() if not is_placeholder(value)}
        values = {
            label: Sent.of(value)
            for label, value in here.items()
            if is_small(value) or ((label in read or label in told) and travels(value))
        }
        labels = [effect.place.label for effect in self._effects if effect.from_units]
        rules = {label: self._rules.get(label) for label in labels}
        by_rows = {label: rule for label, rule in rules.items() if isinstance(rule, Rows)}
        elsewhere = [label for label, value in made.items() if is_placeholder(value)]
        none = [label for label, value in made.items() if isinstance(value, Unmerged)]
        grown = {one: added_to(made[one], self._start[one]) for one in here.keys() - values}
        added = {label: new for label, new in grown.items() if new is not None}
        return FromLast(values, added, by_rows, none, elsewhere)

    def _made(self) -> dict[str, Any]:
        return {
            e.place.label: e.place.get()
            for e in self._effects
            if is_told_as_attribute(e) and (e.from_units or self._is_at_end(e) or e in self._waiting)
        }

    def _is_at_end(self, effect: Effect) -> bool:
        """Whether the step does so where another rank may have ended it: at a value of the last stage."""
        return type(effect.place.owner) is Owner and max(effect.positions, default=0) > 0

    def take(self, shared: FromLast, device: torch.device) -> tuple[list[Effect], list[Effect]]:
        """Elsewhere: set what the last stage has sent.

        Args:
            shared: All that it told.
            device: Of the run.

        Returns:
            What was set, and the rest, which is on the last stage only.
        """
        taken, rest = [], []
        self._rules.update(shared.rows)
        for effect in self._elsewhere:
            if effect.place.label in shared.values:
                _take(effect.place, shared.values[effect.place.label].received(device))
                taken.append(effect)
            elif (new := shared.added.get(effect.place.label)) and new.into(effect.place.get(), device):
                taken.append(effect)
            elif effect.place.label in shared.unmerged:
                effect.place.put(Unmerged(attribute_name(effect.place), self._step))
                taken.append(effect)
            elif not effect.deep and effect.place.label not in shared.elsewhere:
                rest.append(effect)
        for effect in self._effects:
            if effect.place.label in shared.values:
                value = shared.values[effect.place.label].received(device)
                if not equal(effect.place.get(), value):
                    _take(effect.place, value)
        return taken, rest

    # ---- gradients that the step asked for

    @property
    def retains(self) -> bool:
        """Whether hooks may read gradients of what the step leaves; the same on all ranks."""
        return bool(self._retaining)

    def retained(self) -> Gradients:
        """Those that this rank has, after `take`."""
        return self._retained.gradients(self._rules)

    def take_gradients(self, found: Sequence[Gradients]) -> None:
        """Let what the step left have them, as on one device.

        Args:
            found: By each rank.
        """
        for effect in self._retaining:
            place, label = effect.place, effect.place.label
            value = place.get()
            if isinstance(value, Guard) or not travels(value):
                continue
            own = [one[label] for one in found if label in one]
            value = map_tensors(lambda tensor: tensor.detach().clone(), value)
            if give_gradients(value, own) or not own:
                _take(place, value)
            else:
                place.put(Unmerged(f"the gradient of {attribute_name(place)}", self._step))


class AsOne:
    """For a step that runs once for the whole batch: what stands there then is what one device leaves.

    Args:
        state: Of the batch, whose micro-batches do not count.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state

    def before(self, microbatch: int | None, *, counts: bool) -> None:
        """Everything is as when the batch began."""
        self._state.before(None, counts=counts)

    def after(self, *, counts: bool) -> None:
        """There is nothing to put together."""


class NewItems(NamedTuple):
    """What was added to the end of a list."""

    items: list[Any]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def is_told_as_attribute(effect: Effect) -> bool:
    """Whether ranks tell each other what stands there by its place, and not as a state of the module."""
    return not effect.deep or isinstance(effect.place.owner, TensorOwner)


def _is_for_backward(effect: Effect) -> bool:
    """Whether a backward to come reads it as the step has left it: weights, and whether they are frozen."""
    return effect.deep or type(effect.place.owner) is Flags


def is_absent(effect: Effect) -> bool:
    """Whether it is a weight or buffer of another stage that the step changes: that stage does."""
    return effect.deep and is_placeholder(effect.place.get())


def replay_from(place: Place) -> None:
    """Let an iterator there begin here: each replay of the step takes the same of it."""
    value = place.get()
    if isinstance(value, Replayed):
        value.forget()
    elif hasattr(type(value), "__next__"):
        place.put(Replayed(value))


class _Grown:
    """A list or deque at the end of which items were added: these.

    Args:
        items: In order.
        inside: What was added to lists inside it, by their place in what was kept of it.
    """

    def __init__(self, items: list[Any], inside: dict[int, list[Any]]) -> None:
        self.items, self.inside = items, inside


def _grown_inside(start: Kept) -> dict[int, list[Any]]:
    """What was added to the lists inside a list, such as one for each loader."""
    return {
        index: own_containers(held[len(saved) :])
        for index, (held, saved) in enumerate(start.inner)
        if index and type(held) is list and len(held) > len(saved) and _is_grown(held, saved)
    }


def _put_inside(start: Kept, found: list[dict[int, list[Any]]], sizes: list[int], merge: Merge) -> None:
    """Let the lists inside a list be as one device would have left them."""
    for index in sorted({index for inside in found for index in inside}):
        held, saved = start.inner[index]
        new = _merged(usual, [], [inside.get(index, []) for inside in found], sizes, merge)
        fill(held, [*saved, *new])


def _filled(old: Any, whole: Any) -> Any:
    """A container with other contents; those in a dictionary stay the ones that others know, too."""
    if isinstance(old, dict) and isinstance(whole, dict):
        for key, item in whole.items():
            known = old.get(key)
            if (
                known is not item
                and type(known) is type(item)
                and isinstance(known, list | dict | set | deque)
            ):
                whole = {**whole, key: _filled(known, item)}
    fill(old, whole)
    return old


def _is_grown(value: Any, before: Any) -> bool:
    """Whether all that was there is, at the same places; a full deque does not tell what it has let go."""
    is_full = isinstance(value, deque) and len(value) == value.maxlen == len(before)
    return not is_full and len(value) >= len(before) and all(map(is_, value, before))


def _is_new(result: Any, before: Any) -> bool:
    """Whether a micro-batch has changed what stood there."""
    if isinstance(result, _Grown):
        return bool(result.items or result.inside)
    return not equal(result, before)


def _length(value: Any) -> list[Any]:
    return [value.maxlen] if isinstance(value, deque) else []


def _in_order(before: Any, results: list[Any]) -> Any:
    """Something for the next forward of a unit, where no rule puts together what micro-batches left."""
    if not all(isinstance(result, _Grown) for result in results):
        return results[-1]
    return type(before)([*before, *(item for result in results for item in result.items)], *_length(before))


def _all(before: Any, result: Any) -> Any:
    return [*before, *result.items] if isinstance(result, _Grown) else result


def _merged(rule: Rule, before: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    if all(result is before for result in results):
        return before
    if any(result is MISSING for result in results):
        if all(result is MISSING for result in results):
            return MISSING
        raise NoFit
    return rule(before, results, sizes, merge)


def _take(place: Place, value: Any) -> None:
    """Let a value stand there; a dictionary that does stays the one that others know."""
    old = place.get()
    let_make(value, old)
    if isinstance(old, dict) and type(old) is type(value):
        fill(old, value)
    else:
        place.put(value)
