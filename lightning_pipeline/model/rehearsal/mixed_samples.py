"""Steps that mix samples of the batch: each micro-batch is given its part of what the batch has."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Microbatch, Route, called_otherwise
from lightning_pipeline.model.loss import Observer
from lightning_pipeline.model.mixing import (
    Beside,
    Comparison,
    Derivations,
    Followed,
    Functions,
    Given,
    Reached,
    Rows,
    Seen,
    are_alike,
    is_cut_by_rows,
    placed_between,
    sums_of_parts,
)
from lightning_pipeline.model.places import Effect, FilledContainers, Kept, Place, Replayed
from lightning_pipeline.model.random import Draws
from lightning_pipeline.model.rehearsal.routes import RouteFinder
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import own_containers
from lightning_pipeline.model.state import CannotRepeatError, is_small
from lightning_pipeline.model.trace import Trace

_Any = TypeVar("_Any", bound=Functions)
_AGAIN = (2, 3, 4, 8)  # batches
_MOST_LOOKS = 32


class MixedSamples:
    """Steps that mix samples of the batch alone: each micro-batch is given its samples of the batch's.

    The step is run without units for the batch, and twice for each micro-batch: by itself, which says what
    shapes its results have, and with its part of the batch's.

    Args:
        root: The LightningModule.
        rehearse: Runs a step on a stage of this rank; see `DryRuns.rehearse`.
        finder: Of ways through the model.
        apart: Inside, runs of a step leave nothing behind and tell nobody anything.
        begun: Inside, given the number of a micro-batch or None, what was left by rows is cut for it; see
            `LeftBehind.begun`.

    Attributes:
        partly: Steps whose micro-batches have their own of some of what the step mixes.
        mended: Whether micro-batches of the last batch are given their part.
        are_units_apart: Whether they are not, and decide apart what units are given, or their flags.
    """

    def __init__(
        self, root: nn.Module, rehearse: Callable[..., None], finder: RouteFinder,
        apart: Callable[[str], AbstractContextManager[None]],
        begun: Callable[..., AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._root, self._rehearse, self._finder, self._apart = root, rehearse, finder, apart
        self._begun = begun
        self._given_up: set[tuple[str, tuple[int, ...]]] = set()
        self._looks: dict[str, int] = {}
        self._combinations: dict[str, set[Hashable]] = {}  # of functions that batches and parts have called
        self._batches = Counter[str]()
        self.partly = set[str]()
        self.mended = self.are_units_apart = False
        self._filled = FilledContainers(CannotRepeatError)
        self._left_at: dict[str, str] = {}  # a line of steps that freeze others for a micro-batch
        self._reading = set[str]()  # steps that read containers which they also fill
        self._whole: set[tuple[str, tuple[int, ...]]] = set()  # of which what is given was looked at

    def arrange(
        self, step: Step, trace: Trace, whole: Microbatch | None, sizes: Sequence[int], *,
        mends: Callable[[Trace, Sequence[int]], bool], find_ways: Callable[..., None],
    ) -> None:  # fmt: skip
        """A batch begins: find the way of each micro-batch, and what it is given of mixed samples.

        Args:
            step: The batch.
            trace: Of the step.
            whole: Its arguments as one, where they are known.
            sizes: Samples of each micro-batch.
            mends: Whether micro-batches are to be given theirs.
            find_ways: Finds the ways, or lets all take one.
        """
        mixes = step.seeds.one_host = whole is not None and mends(trace, sizes)
        find_ways(step, sizes)
        self.mended = self.are_units_apart = False
        if whole is None or len(sizes) == 1:
            step.ways.unlooked.clear()
            return
        self._compare_called(step, whole, sizes)
        self.look(step, trace, whole, sizes)
        if not mixes and mends(trace, sizes):
            mixes = step.seeds.one_host = True
            find_ways(step, sizes)
        if mixes and not self.begin(step, whole, sizes, find_ways):
            step.seeds.one_host = False
            find_ways(step, sizes)
        self.mended = bool(step.mixing)
        if step.name in self._left_at and not (self.mended or self._freeze(step, whole)):
            trace.mixed.setdefault(self._left_at[step.name], ("a condition by which layers are frozen", 0))
        torn = step.name in self._finder.torn and not self.mended
        self.are_units_apart = torn and self._decides_apart(step, whole, sizes)

    def _compare_called(self, step: Step, whole: Microbatch, sizes: Sequence[int]) -> None:
        """What the batch calls, beside its micro-batches: they decide apart, or are to be looked at.

        They do where they call other units; of other functions, and units that stand otherwise, a look tells.
        """
        if not step.trace.steered or _takes(step.trace):
            return
        parts = self._finder.called
        try:
            with self._begun(None, sizes):
                (route,) = self._finder.routes(step.ways, [whole], lambda _: step.seeds.microbatch(0))
        except SplitError:
            return  # of what cannot be run at this size the micro-batches alone tell
        pairs = zip(step.routes, sizes, strict=True)
        if any(called_otherwise(route, own, size, sum(sizes)) is not None for own, size in pairs):
            self._finder.torn.add(step.name)
        (of_whole,), known = self._finder.called, self._combinations.setdefault(step.name, set())
        others = [number for number, called in enumerate(parts) if called != of_whole]
        combination = frozenset(one.functions for one in parts), of_whole.functions
        if others and combination not in known:
            known.add(combination)
            step.ways.unlooked = sorted({*step.ways.unlooked, others[0]})

    def look(self, step: Step, trace: Trace, whole: Microbatch, sizes: Sequence[int]) -> None:
        """Find out whether a step mixes samples in a way that its trace does not show; alike on all ranks.

        It is looked at in its first batch, and where its micro-batches call other functions than before.
        Where it keeps something of its batches, which it may read, it is looked at in some later ones, too.

        Args:
            step: The batch, whose ways are known.
            trace: Of the step, which is told.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
        """
        numbers, step.ways.unlooked = step.ways.unlooked, []
        first = step.name not in self._looks
        self._batches[step.name] += 1
        if first or (self._batches[step.name] in _AGAIN and _keeps(trace)):
            numbers = [0, *filter(None, numbers)]
        if _takes(trace) or not numbers or not is_cut_by_rows(whole, step.microbatches, sizes):
            return
        left = _MOST_LOOKS - self._looks.get(step.name, 0)
        numbers = numbers[: max(left, 0)]
        self._looks[step.name] = _MOST_LOOKS - left + len(numbers)
        for number in numbers:
            if (number or not first) and not self._is_seen(step, trace, number):
                continue
            for line, found in self._mixed(step, trace, whole, number, sizes).items():
                trace.mixed.setdefault(line, found)

    def _is_seen(self, step: Step, trace: Trace, number: int) -> bool:
        """Add what a micro-batch that calls other functions does to the trace, if it can be traced alone."""
        try:
            trace.may_do(self._finder.traced(step, number))
        except SplitError:  # it raises what is wrong with it; of a batch that runs as one it may be no part
            return False
        return True

    def _mixed(
        self, step: Step, trace: Trace, whole: Microbatch, number: int, sizes: Sequence[int]
    ) -> dict[str, tuple[str, int]]:
        def run(part: int | None, seen: Functions, changed: Callable[[Any], Any]) -> None:
            batch, route = (whole, of_whole) if part is None else (step.microbatches[part], step.routes[part])
            with self._apart(step.name), self._begun(part, sizes, changed):
                self._run(step, changed(batch), number, route, seen)

        absent, of_whole = self._finder.on_some_stages(), step.routes[number]
        reading = set(self._reading)
        compared = Comparison(run, self._root, absent if self._is_known(trace) else [], sizes)
        try:
            if not trace.draws_unseen and compared.is_as_given(number, step.microbatches[number], absent):
                return {}
            with suppress(SplitError):  # of what cannot be run at this size the micro-batch alone tells
                (of_whole,) = self._finder.routes(step.ways, [whole], lambda _: step.seeds.microbatch(number))
                found = compared.lines(number, decides=trace.steered or not number)
                trace.by_sizes |= compared.by_sizes
                if compared.left_at:
                    self._left_at[step.name] = compared.left_at
                return found
            return compared.lines_of(number)
        except (CannotRepeatError, SplitError):
            if step.name in self._reading - reading:
                return self._mixed(step, trace, whole, number, sizes)
            return {}  # of what cannot be run again, the trace alone tells

    def mends(self, trace: Trace, sizes: Sequence[int]) -> bool:
        """Whether a step mixes samples, and may be given those of the batch; alike on all ranks.

        Args:
            trace: Of the step.
            sizes: Samples of each micro-batch.
        """
        mixes = bool(trace.mixed) or trace.has_means or trace.by_sizes or trace.step in self._finder.torn
        return mixes and self._is_known(trace) and (trace.step, tuple(sizes)) not in self._given_up

    def _is_known(self, trace: Trace) -> bool:
        """Whether every rank comes to the same where it runs a step without units."""
        is_plain = not (trace.checkpointed or trace.draws_unseen)
        fills = trace.step not in self._reading
        return is_plain and all(_is_known_everywhere(effect, fills=fills) for effect in trace.effects)

    def begin(
        self, step: Step, whole: Microbatch, sizes: Sequence[int], find_ways: Callable[..., None]
    ) -> bool:
        """A batch of such a step begins.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
            find_ways: Finds the ways, or lets all take one.

        Returns:
            Whether the micro-batches are given their part; otherwise that is not tried again for these sizes,
            unless it is for the ways of this batch alone.
        """
        try:
            (route,) = self._finder.routes(step.ways, [whole], lambda _: step.seeds.microbatch(0))
            if any(one.trace.path != route.trace.path for one in step.routes):
                if not self._is_known_for_all(step, route):
                    return False
                find_ways(step, sizes, route)
            found = self._found(step, whole, sizes, route)
        except CannotRepeatError:
            found = None
        if found is None:
            self._given_up.add((step.name, tuple(sizes)))
            return False
        step.mixing = [partial(Given, one.answers, step.name) for one in found]
        return True

    def _freeze(self, step: Step, whole: Microbatch) -> bool:
        """Let backwards train what they do where the batch decides; whether that is known."""
        if not self._is_known(step.trace):
            return False
        try:
            (route,) = self._finder.routes(step.ways, [whole], lambda _: step.seeds.microbatch(0))
            with self._apart(step.name):
                seen, left = self._run_whole(step, whole, route, Seen(self._finder.on_some_stages()))
        except (CannotRepeatError, SplitError):
            return False
        step.left_by_batch = {label: one for label, one in left.items() if type(one) is bool}
        return bool(seen.left)

    def _decides_apart(self, step: Step, whole: Microbatch, sizes: Sequence[int]) -> bool:
        """Whether what decides otherwise for some micro-batches than for others matters to a unit.

        What comes of it in the end, such as a loss that some have no part in, the batch as one will tell, on
        what units have given; that tells nothing of what these were given, nor of their flags.
        """
        runs = [Derivations() for _ in (whole, *sizes)]
        try:
            (route,) = self._finder.routes(step.ways, [whole], lambda _: step.seeds.microbatch(0))
            with self._apart(step.name):
                self._run_whole(step, whole, route, runs[0])
                for number, run in enumerate(runs[1:]):
                    self._run_part(step, number, sizes, run)
        except (CannotRepeatError, SplitError):
            return True
        return not are_alike(runs)

    def _is_known_for_all(self, step: Step, route: Route) -> bool:
        """Whether it is known what units return on the batch's way for micro-batches that take another.

        Of each form there has to be one that takes it.
        """
        if route.trace.follows_values:
            return False
        known = set[Hashable]()
        for number, (own, batch) in enumerate(zip(step.routes, step.microbatches, strict=True)):
            if own.number == route.number:
                self._finder.outputs(route, batch, partial(step.seeds.microbatch, number))
                known.add(signature_of(*batch))
        return all(signature_of(*batch) in known for batch in step.microbatches)

    def _found(
        self, step: Step, whole: Microbatch, sizes: Sequence[int], route: Route
    ) -> list[Followed] | None:
        if not is_cut_by_rows(whole, step.microbatches, sizes):
            return None
        found, start = [], 0
        with self._apart(step.name):
            elsewhere = self._finder.on_some_stages()
            batch, left = self._run_whole(step, whole, route, Seen(elsewhere))
            if left and not batch.ended:
                return None
            for also in batch.asks()[:-1]:
                parts = [
                    self._run_part(step, number, sizes, Seen(elsewhere, batch, also=also))
                    for number in range(len(sizes))
                ]
                if all(part.keys == batch.keys for part in parts):
                    break
            added = sums_of_parts(batch, parts) if step.trace.tells_numbers or batch.returns_more else ()
            for number, (own, size) in enumerate(zip(parts, sizes, strict=True)):
                one = Followed(batch, own, Rows(start, size, sum(sizes)), added)
                if not one.failed:
                    self._run_part(step, number, sizes, one)
                if one.failed or len(one.answers) != len(batch.calls):
                    return None
                found.append(one)
                start += size
            if any(one.leaves_some for one in found):
                self.partly.add(step.name)
            elif not self._is_whole(step, whole, route, found, sizes):
                return None
            step.left_by_batch = left
            return found

    def _is_whole(
        self, step: Step, whole: Microbatch, route: Route, found: list[Followed], sizes: Sequence[int]
    ) -> bool:
        """Whether a micro-batch that is given its part has nothing else that the batch has otherwise."""
        if (step.name, tuple(sizes)) in self._whole:
            return True
        elsewhere = self._finder.on_some_stages()
        of_whole = Reached(self._root, elsewhere)
        self._run_whole(step, whole, route, of_whole)
        self._whole.add((step.name, tuple(sizes)))
        for number in {0, len(sizes) - 1}:
            own, rows = Reached(self._root, elsewhere), Rows(sum(sizes[:number]), sizes[number], sum(sizes))
            self._run_part(step, number, sizes, Beside(own, Given(found[number].answers, step.name)))
            if placed_between(of_whole, own, rows):
                return False
        return True

    def _run_whole(
        self, step: Step, whole: Microbatch, route: Route, mixing: _Any
    ) -> tuple[_Any, dict[str, Any]]:
        """A run for the batch, and what it leaves behind of what depends on no unit, by label."""
        with self._left_as_it_is(step) as kept:
            self._run(step, whole, 0, route, mixing)
            left = {
                place.label: _left_there(place, start)
                for effect, place, start in kept
                if not effect.from_units
                or (isinstance(mixing, Seen) and mixing.is_made_here(effect.place.get()))
            }
        return mixing, left

    def _run_part(self, step: Step, number: int, sizes: Sequence[int], mixing: _Any) -> _Any:
        """A run for a micro-batch, which finds what one does."""
        with self._begun(number, sizes), self._left_as_it_is(step):
            return self._run(step, step.microbatches[number], number, step.routes[number], mixing)

    @contextmanager
    def _left_as_it_is(self, step: Step) -> Iterator[list[tuple[Effect, Place, Kept]]]:
        kept = [(e, e.place, Kept.of(e.place.get(), deep=True)) for e in step.trace.effects]
        try:
            yield kept
        finally:
            for _, place, start in kept:
                start.give_back(place)

    def _run(self, step: Step, batch: Microbatch, number: int, route: Route, mixing: _Any) -> _Any:
        outputs = self._finder.outputs(route, batch, partial(step.seeds.microbatch, number))
        mixing.begin(batch)
        with self._filled.alone(() if step.name in self._reading else step.trace.effects) as read:
            self._rehearse(batch, outputs, number, Observer([]), Draws(), mixing)
        if read:
            self._reading.add(step.name)
            raise CannotRepeatError(read[0])
        return mixing


def _takes(trace: Trace) -> bool:
    """Whether a step takes from an iterator."""
    return any(isinstance(effect.place.get(), Replayed) for effect in trace.effects)


def _keeps(trace: Trace) -> bool:
    """Whether a step keeps lists or tensors that depend on its batches alone."""
    held = [effect.place.get() for effect in trace.effects if not effect.from_units]
    return any(isinstance(one, Tensor | list | dict | deque) for one in held)


def _is_known_everywhere(effect: Effect, *, fills: bool) -> bool:
    """Whether what stands there can be kept for another run, and each rank has it or none needs it."""
    value = effect.place.get()
    if isinstance(value, Replayed):
        return False
    return not effect.from_units or is_small(value) or (fills and effect.is_container)


def _left_there(place: Place, start: Kept) -> Any:
    value = place.get()
    return value.detach().clone() if isinstance(value, Tensor) else own_containers(value, start.items())
