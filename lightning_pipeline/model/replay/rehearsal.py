"""Runs of a step without any unit: to see which it calls, and what one device would divide by."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import DynamicOutputShapeException
from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Microbatch, Route, StageDone, StepRoutes, TracedOutputs
from lightning_pipeline.model.loss import Follower, Guess, Observer, Whole, rehearsed, told_apart
from lightning_pipeline.model.mixing import (
    Beside,
    Comparison,
    Followed,
    Functions,
    Given,
    Reached,
    Rows,
    Seen,
    is_cut_by_rows,
    placed_between,
    sums_of_parts,
)
from lightning_pipeline.model.random import Draws, Generators, MicrobatchSeeds, host_draws
from lightning_pipeline.model.replay.replay import Replay
from lightning_pipeline.model.replay.routes import Reads, RouteFinder
from lightning_pipeline.model.replay.view import StageView, Step, WholeBatch
from lightning_pipeline.model.replay.worth import Worth
from lightning_pipeline.model.state import Apart, CannotRepeatError
from lightning_pipeline.model.tensors import (
    TensorSpec,
    fitted,
    is_placeholder,
    of_most,
    operands_of,
    sizes_between,
    tensors_in,
)
from lightning_pipeline.model.trace import (
    SCALAR_READS,
    Guesses,
    Replayed,
    Trace,
    UnitPatches,
    holds_noted,
    inputs_of,
    is_tensor_read,
    reentrant_checkpoint_replaced,
)

_Any = TypeVar("_Any", bound=Functions)
_MOST_LOOKS = 32
_GUESSES = (
    (0.7310585786300049, 1.0, 0),
    (0.6428571428571137, 0.5, 1),
)  # numbers that no micro-batch has by chance
_FAR = ((97.31058578630049, 0.25, 97), (-97.31058578630049, 0.25, 97))  # beyond most bounds


class _EndlessError(Exception):
    """A loop goes on for as long as made-up numbers say so."""


class _UnknownWholeError(Exception):
    """The whole batch cannot be traced, though its micro-batches may be."""


class Rehearsal(Replay):
    """One run of a step in which every unit only says what shape its output has.

    Args:
        view: Of the last stage.
        outputs: What each call of a unit returns.
        seeds: Of the random draws.
        observer: Sees the functions between the units.
        draws: Sees the random ones.
    """

    def __init__(
        self,
        view: StageView,
        outputs: TracedOutputs,
        seeds: MicrobatchSeeds,
        observer: Observer,
        draws: Draws,
    ) -> None:
        super().__init__(view, 0, None, seeds)
        self.is_last = False  # so that nothing is logged
        self.follow, self._observer = observer.call, observer
        self._outputs, self._draws = outputs, draws
        self._guesses = Guesses(holds=view.guesses_hold, fraction=observer.guess.number)
        self._host = seeds.host_place()
        self.rehearses = True  # what it logs is of the whole batch

    @property
    def is_sure(self) -> bool:
        """Whether no value of units has been made up."""
        return not self._observer.guess.made

    def rehearse(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Call the step; it ends where a placeholder stops it."""
        try:
            with self.functions, self._taint:
                result = function(*args, **kwargs)
            if self.mixing is not None:
                self.mixing.end(result)
        except Exception:  # what was seen until then counts; the micro-batches raise what is wrong
            return
        finally:
            self._draws.host_at(self._host, self._seeds.host_place())

    def close(self) -> None:
        """Let go of all values, those that its observers hold too: they may hold the graphs of weights."""
        super().close()
        self.mixing = self.follow = None

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a unit."""
        nth = self._counts[unit]
        self._counts[unit] = nth + 1
        self._observer.unit(unit, nth)
        structure, specs = self._outputs.given(unit, nth, (args, kwargs))
        tensors = [self._view.placeholder((unit, nth, leaf), spec) for leaf, spec in enumerate(specs)]
        self._seeds.lose(again=unit in self._view.repeated)
        if self._view.host_random:
            self._draws.host_at(self._host, self._seeds.host_place())
            self._seeds.host(unit, nth)
            self._host = self._seeds.host_place()
        return self._put_together(list(tensors), structure, self._around(unit, nth, args, kwargs))

    def random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A random call between units."""
        result = super().random(func, args, kwargs)
        self._draws.drawn(func, args, kwargs, result)
        return result

    def placeholder_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Answer where a number is read, so that the run goes on, as the trace does."""
        if func._schema.name in SCALAR_READS:
            self.remembered.goes_by_run()
            self._observer.guess.made = True
            if self._guesses.are_endless:
                raise _EndlessError
            found = self._guesses.answer(func, next(filter(is_placeholder, operands_of(args, kwargs))))
            is_count = isinstance(found, int) and not isinstance(found, bool)
            return found + self._observer.guess.more if is_count else found
        try:
            result = super().placeholder_operation(func, args, kwargs, run)
        except DynamicOutputShapeException:
            self.remembered.goes_by_run()
            self._observer.guess.made = True
            result = of_most(func, args, kwargs, self._of_some_size)
            if result is None and func._schema.name == "aten::bincount":
                result = self._counts_of(*args, **kwargs)
            if result is None:
                raise
        self._guesses.note(func, operands_of(args, kwargs), operands_of((result,)))
        return result

    def _counts_of(self, value: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        dtype = torch.int64 if weights is None else weights.dtype
        shape = (max(value.numel(), minlength),)
        return self._of_some_size(TensorSpec(shape, None, dtype, value.device.type, False))

    def _of_some_size(self, spec: TensorSpec) -> Tensor:
        """What has as many rows as values say."""
        rows = math.ceil(spec.shape[0] * self._observer.guess.share)
        return self._view.mode.make(spec._replace(shape=(rows, *spec.shape[1:]), stride=None))


class _NewWay(BaseException):
    """No known way goes on like this."""


class Walk(Replay):
    """One run of a step without any unit, to see which units it calls.

    Args:
        view: Of a stage.
        seeds: Of the random draws.
        routes: The ways that are known.
        fit: The shape of a value in this micro-batch, from that in a trace.
        reads: Takes the numbers that code between units reads.
    """

    def __init__(
        self, view: StageView, seeds: MicrobatchSeeds, routes: StepRoutes,
        fit: Callable[[Route, TensorSpec], TensorSpec], reads: Reads,
    ) -> None:  # fmt: skip
        super().__init__(view, 0, None, seeds)
        self.is_last = False  # so that nothing is logged
        self._node, self._depth, self._fit, self._reads = routes.start, 0, fit, reads
        self.follow, self._is_guess = self._note, False
        self.called = 0  # which functions were called between units, in order
        self._guesses = Guesses(holds=routes.base.trace.holds)

    def walk(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Route | None:
        """Call the step, up to where values are needed; None where the way is not known."""
        stood = self._host_draws()
        try:
            self._reads.begin()
            with self.functions, self._taint:
                function(*args, **kwargs)
        except StageDone:
            pass
        except _NewWay:
            return None
        except Exception:  # shapes that do not fit; the micro-batch raises what is wrong
            self._reads.tell_all, self._reads.failed = False, True
            return self._node.ends or self._node.through
        self._reads.tell_all &= self._host_draws() == stood
        return self._node.ends

    def _note(self, func: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
        self._is_guess = False
        self.called = hash((self.called, func))
        if self._reads.collects and (is_tensor_read(func) or holds_noted((args, kwargs))):
            self._reads.by_form = False
        result = run(func, args, kwargs)
        self._guesses.note_function(func, result)
        if not self._is_guess:
            self._reads.note(func, result)
        return result

    def placeholder_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Answer where a number is read, as the trace does: what is left behind after it counts, too."""
        if func._schema.name in SCALAR_READS:
            self.remembered.goes_by_run()
            self._is_guess = True
            return self._guesses.answer(func, next(operands_of(args, kwargs)))
        try:
            result = super().placeholder_operation(func, args, kwargs, run)
        except DynamicOutputShapeException:
            self.remembered.goes_by_run()
            self._is_guess = True
            result = of_most(func, args, kwargs, self._view.mode.make)
            if result is None:
                raise
        self._guesses.note(func, operands_of(args, kwargs), operands_of((result,)))
        return result

    def _host_draws(self) -> str:
        return host_draws(Generators(self._view.root.modules())) if self._reads.collects else ""

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._reads.on_call()
        nth = self._counts[unit]
        self._counts[unit] = nth + 1
        node = self._node.following.get(unit)
        if node is None:
            raise _NewWay
        call = node.through.trace.calls[self._depth]
        self._node, self._depth = node, self._depth + 1
        specs = call.resized(inputs_of((args, kwargs))) or [self._fit(node.through, s) for s in call.specs]
        tensors = [self._view.placeholder((unit, nth, leaf), spec) for leaf, spec in enumerate(specs)]
        self._seeds.lose(again=unit in self._view.repeated)
        if self._view.host_random and not self._seeds.host_is_users():
            self._seeds.host(unit, nth)
        return self._put_together(tensors, call.structure, self._around(unit, nth, args, kwargs))

    def _reads_value(self, reason: str) -> BaseException:
        return StageDone()


class DryRuns:
    """Runs the step of a batch that has begun, with placeholders for all that units return.

    Args:
        view: Of a stage of this rank.
        patches: The patched units.
    """

    def __init__(self, view: StageView, patches: UnitPatches) -> None:
        self._view, self.patches = view, patches

    def rehearse(
        self, batch: Microbatch, outputs: TracedOutputs, number: int,
        observer: Observer, draws: Draws, mixing: Functions | None = None,
    ) -> None:  # fmt: skip
        """Run the step with the seeds of a micro-batch. See `Rehearsal`."""
        step = self._view.current_step()
        run = Rehearsal(self._view, outputs, step.seeds.microbatch(number), observer, draws)
        run.mixing, run.rehearses = mixing, mixing is None
        with self._answering(run):
            run.rehearse(step.function, self._view.fresh(batch[0]), self._view.fresh(batch[1]))

    def walk(
        self, batch: Microbatch, seeds: Callable[[], MicrobatchSeeds], routes: StepRoutes, reads: Reads
    ) -> Route | None:
        """Find out which units the step calls for a micro-batch. See `Walk`."""
        view, now = self._view, signature_of(*batch)
        step, sizes = view.current_step(), dict[int, Any]()

        def fit(route: Route, spec: TensorSpec) -> TensorSpec:
            if route.number not in sizes:
                sizes[route.number] = sizes_between(route.trace.arguments, now)
            return fitted(spec, sizes[route.number])

        view.take(routes.base)
        view.ports = routes.ports
        run = Walk(view, seeds(), routes, fit, reads)
        try:
            with self._answering(run):
                return run.walk(step.function, view.fresh(batch[0]), view.fresh(batch[1]))
        finally:
            view.route = None
            reads.called = run.called

    @contextmanager
    def _answering(self, run: Replay) -> Iterator[None]:
        self.patches.runner, self._view.mode.watcher = run, run
        try:
            with self._view.current_step().context(), reentrant_checkpoint_replaced(lambda: run.inside):
                yield
        finally:
            self.patches.runner = self._view.mode.watcher = None
            run.close()


class Divisors:
    """What one device divides losses and logged values by, where that is not the number of samples.

    Args:
        root: The LightningModule.
        runs: Of the last stage.
        finder: Of ways through the model.
        apart: Inside, a run of a step leaves nothing behind.
        silent: Inside, a run of a step tells nobody anything.
        noted: Inside that, what the step of a whole batch gives to metrics is noted.
        alone: Inside, runs of a step by this rank alone leave nothing behind.
        quiet: Inside that, runs on made-up values log nothing, and keep random states.
    """

    def __init__(
        self, root: nn.Module, runs: DryRuns, finder: RouteFinder, apart: Apart,
        silent: Callable[[], AbstractContextManager[None]],
        noted: Callable[[], AbstractContextManager[None]],
        alone: Callable[[str], AbstractContextManager[None]],
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._root, self._runs, self._finder = root, runs, finder
        self._worth = Worth(root, runs.patches, finder.outputs, alone, quiet)
        self._apart, self._silent, self._noted = apart, silent, noted
        self._followers: dict[str, Follower] = {}
        self._bounds: set[str] = set()  # steps of which is known what goes by values of units

    def follow(self, step: Step, whole: WholeBatch) -> None:
        """A batch begins: find out, or have it found out while its micro-batches run.

        Args:
            step: The batch.
            whole: Its arguments as one, and the shares of its micro-batches.
        """
        arguments, fractions, step.scale = whole
        follower = step.follower = self._followers.setdefault(step.name, Follower(self._root, step.name))
        tensors = list(tensors_in(arguments))

        def rehearse() -> list[Whole] | str:
            try:
                wholes = self._rehearsed(step, arguments, tensors)
            except CannotRepeatError as iterator:
                return f"takes from {iterator}"
            except _UnknownWholeError as error:
                return f"cannot be traced for the batch as a whole ({error})"
            for seen in wholes if step.trace.draws_unseen else ():
                seen.unclear = "a function that is not known to"
            return wholes

        follower.warn_of_losses(step.trace.losses_inside, tensors)
        tried = partial(self._worth.of, step, arguments, fractions)  # by each micro-batch's own numbers
        follower.begin(fractions, tensors, rehearse, (lambda: None) if step.mixing else tried)

    def _rehearsed(self, step: Step, arguments: Any, tensors: list[Tensor]) -> list[Whole]:
        """What was seen for each micro-batch; twice, where something was made up that it goes by."""

        def run(guess: Guess) -> list[Whole]:
            parts = [arguments] if step.mixing else step.microbatches  # whose draws are the batch's own
            found = rehearsed(
                arguments, parts, partial(self._rehearse, step), lambda: Observer(tensors, guess)
            )
            return found * len(step.microbatches) if step.mixing else found

        first, second = (Guess(*given) for given in _GUESSES)
        wholes = run(first)
        if first.made:
            others = zip(wholes, run(second), strict=False)
            for whole, other in {id(one): (one, two) for one, two in others}.values():
                told_apart(whole, other)
            for given in () if step.name in self._bounds else _FAR:
                run(Guess(*given))  # for what it logs
            self._bounds.add(step.name)
        return wholes

    def _rehearse(self, step: Step, batch: Microbatch, number: int, observer: Observer, draws: Draws) -> None:
        """Run the step once without units, and leave nothing behind.

        Raises:
            CannotRepeatError: It takes from an iterator.
            _UnknownWholeError: It calls units with shapes of which nobody here knows what comes out.
        """
        seeds = partial(step.seeds.microbatch, number)
        (route,) = self._finder.routes(step.ways, [batch], lambda _: seeds())
        with self._apart.running(step.name) as outside:
            try:
                outputs = self._finder.outputs(route, batch, seeds)
            except SplitError as error:  # what is wrong with the micro-batches, too, they raise
                raise _UnknownWholeError(error) from error
            outside.check()
            noted = nullcontext if any(batch is part for part in step.microbatches) else self._noted
            with self._silent(), noted():
                self._runs.rehearse(batch, outputs, number, observer, draws)


class Mixing:
    """Steps that mix samples of the batch alone: each micro-batch is given its samples of the batch's.

    The step is run without units for the batch, and twice for each micro-batch: by itself, which says what
    shapes its results have, and with its part of the batch's.

    Args:
        root: The LightningModule.
        runs: Of a stage of this rank.
        finder: Of ways through the model.
        apart: Inside, runs of a step leave nothing behind and tell nobody anything.
    """

    def __init__(
        self, root: nn.Module, runs: DryRuns, finder: RouteFinder,
        apart: Callable[[str], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._root, self._runs, self._finder, self._apart = root, runs, finder, apart
        self._given_up: set[tuple[str, tuple[int, ...]]] = set()
        self._looks: dict[str, int] = {}
        self._whole: set[tuple[str, tuple[int, ...]]] = set()  # of which what is given was looked at

    def arrange(
        self, step: Step, trace: Trace, whole: Microbatch | None, sizes: Sequence[int], *,
        mends: Callable[[Trace, Sequence[int]], bool], find_ways: Callable[[Step, Sequence[int]], None],
    ) -> None:  # fmt: skip
        """A batch begins: find the way of each micro-batch, and what it is given of mixed samples.

        Args:
            step: The batch.
            trace: Of the step.
            whole: Its arguments as one, where they are known.
            sizes: Samples of each micro-batch.
            mends: Whether micro-batches are to be given theirs.
            find_ways: Finds the ways.
        """
        mixes = step.seeds.one_host = whole is not None and mends(trace, sizes)
        find_ways(step, sizes)
        if whole is None or len(sizes) == 1:
            step.ways.unlooked.clear()
            return
        self.look(step, trace, whole, sizes)
        if not mixes and mends(trace, sizes):
            mixes = step.seeds.one_host = True
            find_ways(step, sizes)
        if mixes and not self.begin(step, whole, sizes):
            step.seeds.one_host = False
            find_ways(step, sizes)

    def look(self, step: Step, trace: Trace, whole: Microbatch, sizes: Sequence[int]) -> None:
        """Find out whether a step mixes samples in a way that its trace does not show; alike on all ranks.

        It is looked at in its first batch, and where its micro-batches call other functions than before.

        Args:
            step: The batch, whose ways are known.
            trace: Of the step, which is told.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
        """
        numbers, step.ways.unlooked = step.ways.unlooked, []
        numbers = [0, *filter(None, numbers)] if (first := step.name not in self._looks) else numbers
        takes = any(isinstance(effect.place.get(), Replayed) for effect in trace.effects)  # from an iterator
        if takes or not numbers or not is_cut_by_rows(whole, step.microbatches, sizes):
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
            with self._apart(step.name):
                self._run(step, changed(batch), number, route, seen)

        absent, of_whole = self._finder.on_some_stages(), step.routes[number]
        compared = Comparison(run, self._root, absent if self._is_known(trace) else [], sizes)
        try:
            if not trace.draws_unseen and compared.is_as_given(number, step.microbatches[number], absent):
                return {}
            with suppress(SplitError):  # of what cannot be run at this size the micro-batch alone tells
                (of_whole,) = self._finder.routes(step.ways, [whole], lambda _: step.seeds.microbatch(number))
                return compared.lines(number, steered=trace.steered)
            return compared.lines_of(number)
        except (CannotRepeatError, SplitError):
            return {}  # of what cannot be run again, the trace alone tells

    def mends(self, trace: Trace, sizes: Sequence[int]) -> bool:
        """Whether a step mixes samples, and may be given those of the batch; alike on all ranks.

        Args:
            trace: Of the step.
            sizes: Samples of each micro-batch.
        """
        mixes = bool(trace.mixed) or trace.has_means
        return mixes and self._is_known(trace) and (trace.step, tuple(sizes)) not in self._given_up

    @staticmethod
    def _is_known(trace: Trace) -> bool:
        """Whether every rank comes to the same where it runs a step without units."""
        leaves = trace.effects or trace.states_first or trace.checkpointed
        return not (leaves or trace.draws_unseen)

    def begin(self, step: Step, whole: Microbatch, sizes: Sequence[int]) -> bool:
        """A batch of such a step begins.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.

        Returns:
            Whether the micro-batches are given their part; otherwise that is not tried again for these sizes.
        """
        found = self._found(step, whole, sizes)
        if found is None:
            self._given_up.add((step.name, tuple(sizes)))
            return False
        step.mixing = [partial(Given, one.answers, step.name) for one in found]
        return True

    def _found(self, step: Step, whole: Microbatch, sizes: Sequence[int]) -> list[Followed] | None:
        if not is_cut_by_rows(whole, step.microbatches, sizes):
            return None
        (route,) = self._finder.routes(step.ways, [whole], lambda _: step.seeds.microbatch(0))
        found, start = [], 0
        with self._apart(step.name):
            elsewhere = self._finder.on_some_stages()
            batch = self._run(step, whole, 0, route, Seen(elsewhere))
            parts = [
                self._run(step, part, number, step.routes[number], Seen(elsewhere, batch))
                for number, part in enumerate(step.microbatches)
            ]
            added = sums_of_parts(batch, parts) if step.trace.tells_numbers or batch.returns_more else ()
            for number, (part, own, size) in enumerate(zip(step.microbatches, parts, sizes, strict=True)):
                one = Followed(batch, own, Rows(start, size, sum(sizes)), added)
                if not one.failed:
                    self._run(step, part, number, step.routes[number], one)
                if one.failed or len(one.answers) != len(batch.calls):
                    return None
                found.append(one)
                start += size
            return found if self._is_whole(step, whole, route, found, sizes) else None

    def _is_whole(
        self, step: Step, whole: Microbatch, route: Route, found: list[Followed], sizes: Sequence[int]
    ) -> bool:
        """Whether a micro-batch that is given its part has nothing else that the batch has otherwise."""
        if (step.name, tuple(sizes)) in self._whole:
            return True
        elsewhere, rows = self._finder.on_some_stages(), Rows(sum(sizes[:-1]), sizes[-1], sum(sizes))
        of_whole, own = Reached(self._root, elsewhere), Reached(self._root, elsewhere)
        self._run(step, whole, 0, route, of_whole)
        given = Beside(own, Given(found[-1].answers, step.name))
        self._run(step, step.microbatches[-1], len(sizes) - 1, step.routes[-1], given)
        self._whole.add((step.name, tuple(sizes)))
        return not placed_between(of_whole.meetings, own.meetings, rows)

    def _run(self, step: Step, batch: Microbatch, number: int, route: Route, mixing: _Any) -> _Any:
        outputs = self._finder.outputs(route, batch, partial(step.seeds.microbatch, number))
        self._runs.rehearse(batch, outputs, number, Observer([]), Draws(), mixing)
        return mixing
