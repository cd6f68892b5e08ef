"""Runs of a step without any unit: to see which it calls, and what one device would divide by."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_pipeline._torch import DynamicOutputShapeException
from lightning_pipeline.data import signature_of
from lightning_pipeline.model.cut import Calls, Microbatch, Reads, Route, StageDone, StepRoutes, TracedOutputs
from lightning_pipeline.model.loss import Observer
from lightning_pipeline.model.mixing import Functions, standing_of, trained_in
from lightning_pipeline.model.random import Draws, Generators, MicrobatchSeeds, host_draws
from lightning_pipeline.model.replay import Replay, StageView
from lightning_pipeline.model.tensors import (
    TensorSpec,
    counts_apart,
    describe,
    fitted,
    is_placeholder,
    of_most,
    operands_of,
    sizes_between,
)
from lightning_pipeline.model.trace import (
    SCALAR_READS,
    Guesses,
    UnitPatches,
    array_of,
    inputs_of,
    reentrant_checkpoint_replaced,
    turn_of,
)


class _EndlessError(Exception):
    """A loop goes on for as long as made-up numbers say so."""


class _DryRun(Replay):
    """A run of a step in which no unit runs; code between units is answered as in the trace.

    Args:
        view: Of a stage.
        seeds: Of the random draws.
        guesses: Answers where a number is read.
    """

    def __init__(self, view: StageView, seeds: MicrobatchSeeds, guesses: Guesses) -> None:
        super().__init__(view, 0, None, seeds)
        self.is_last = False  # so that nothing is logged
        self._guesses = guesses

    def placeholder_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Answer where a number is read, so that the run goes on, as the trace does."""
        if func._schema.name in SCALAR_READS:
            self._guessed()
            found = self._guesses.answer(func, next(filter(is_placeholder, operands_of(args, kwargs))))
            return self._number(found)
        try:
            result = super().placeholder_operation(func, args, kwargs, run)
        except DynamicOutputShapeException:
            self._guessed()
            result = self._of_size(func, args, kwargs)
            if result is None:
                raise
        self._guesses.note(func, operands_of(args, kwargs), operands_of((result,)))
        return result

    def _guessed(self) -> None:
        """A value of units is made up."""
        self.remembered.goes_by_run()

    def _number(self, found: Any) -> Any:
        """What is given in the place of a number."""
        return found

    def _of_size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What has as many rows as values say; None where nothing is known of it."""
        return of_most(func, args, kwargs, self._view.mode.make, few=self._view.assumed.few)

    def _of_unknown_size(self, error: DynamicOutputShapeException) -> BaseException:
        return error


class Rehearsal(_DryRun):
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
        super().__init__(view, seeds, Guesses(holds=view.assumed.holds, fraction=observer.guess.number))
        self.follow, self.recipes, self._observer = observer.call, observer.recipes, observer
        self._outputs, self._draws = outputs, draws
        self._host = seeds.host_place()
        self.rehearses = True  # what it logs is of the whole batch

    @property
    def is_sure(self) -> bool:
        """Whether no value of units has been made up."""
        return not self._observer.guess.made

    def rehearse(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
        returned: Callable[[Any, bool], None],
    ) -> None:  # fmt: skip
        """Call the step; it ends where a placeholder stops it.

        Args:
            function: The step.
            args: Of it.
            kwargs: Likewise.
            returned: Told what it returned, and whether no value of units was made up.
        """
        try:
            self._observer.recipes.begin((args, kwargs))
            with self.functions, self.taint:
                try:
                    result = function(*args, **kwargs)
                except Exception:  # what was seen until then counts; the micro-batches raise what is wrong
                    return
            self._observer.returned(result)
            if self.rehearses:
                returned(result, self.is_sure)
            if self.mixing is not None:
                self.mixing.leaves(self._view.root)
                self.mixing.end(result)
        finally:
            self._draws.host_at(self._host, self._seeds.host_place())

    def close(self) -> None:
        """Let go of all values, those that its observers hold too: they may hold the graphs of weights."""
        super().close()
        self._observer.recipes.forget()
        self.mixing = self.follow = self.recipes = None

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a unit."""
        nth = self._counts[unit]
        self._counts[unit] = nth + 1
        self._observer.unit(unit, nth)
        structure, specs = self._outputs.given(unit, nth, (args, kwargs))
        step = self._view.current_step()
        step.rehearsed[unit, nth] = structure
        self._observer.guess.made |= step.trace.is_shared
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

    def _guessed(self) -> None:
        super()._guessed()
        self._observer.guess.made = True

    def _number(self, found: Any) -> Any:
        if self._guesses.are_endless:
            raise _EndlessError
        is_count = isinstance(found, int) and not isinstance(found, bool)
        return found + self._observer.guess.more if is_count else found

    def _of_size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = func._schema.name == "aten::bincount" and (kwargs.get("minlength") or len(args) > 2)
        make = self._view.mode.make if asked else self._of_some_size
        guess = self._observer.guess
        guess.counts_apart |= counts_apart(func)
        return of_most(func, args, kwargs, make, few=self._view.assumed.few or guess.few)

    def _of_some_size(self, spec: TensorSpec) -> Tensor:
        """What has as many rows as values say."""
        rows = math.ceil(spec.shape[0] * self._observer.guess.share)
        return self._view.mode.make(spec._replace(shape=(rows, *spec.shape[1:]), stride=None))


class _NewWay(BaseException):
    """No known way goes on like this."""


class Walk(_DryRun):
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
        super().__init__(view, seeds, Guesses(holds=routes.base.trace.assumed.holds, **reads.answers))
        self._node, self._depth, self._fit, self._reads = routes.start, 0, fit, reads
        self.follow, self._is_guess = self._note, False
        self._functions = self._standing = 0

    def walk(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Route | None:
        """Call the step, up to where values are needed; None where the way is not known."""
        stood, trained = self._host_draws(), self._trained()
        with self.functions, self.taint:
            try:
                self._reads.begin()
                function(*args, **kwargs)
                if trained != (now := self._trained()):
                    self._functions = hash((self._functions, now))
            except StageDone:
                pass
            except _NewWay:
                return None
            except Exception:  # shapes of another way; where no trace is made either, it is the user's error
                self._reads.tell_all, self._reads.failed = False, self._node.ends or self._node.through
                return self._reads.failed
        self._reads.tell_all &= self._host_draws() == stood
        return self._node.ends

    @property
    def called(self) -> Calls:
        """What code between units has called, and how units stood."""
        return Calls(self._functions, self._standing)

    @property
    def asks(self) -> tuple[bool, bool]:
        """Whether code has asked for truths that units compute, and whether for numbers."""
        return self._guesses.asked, self._guesses.compares

    def _note(self, func: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
        self._is_guess = False
        self._functions = hash((self._functions, func))
        self._reads.meet(func, args, kwargs)
        array = array_of(func, args[0] if args else None)
        result = run(func, args, kwargs) if array is None else array
        self._guesses.note_function(func, args, kwargs, result)
        if self._guesses.picked.counts(func, args):
            self._reads.read(result)
        elif not self._is_guess:
            self._reads.note(func, result)
        return result

    def _guessed(self) -> None:
        super()._guessed()
        self._is_guess = True
        self._reads.on_value()

    def _trained(self) -> tuple[bool, ...]:
        return trained_in(self._view.root) if self._reads.collects else ()

    def _host_draws(self) -> str:
        return host_draws(Generators(self._view.root.modules())) if self._reads.collects else ""

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._reads.on_call()
        nth = self._counts[unit]
        self._counts[unit] = nth + 1
        node = self._node.following.get(turn_of(unit, describe((args, kwargs), [])))
        if node is None:
            raise _NewWay
        call = node.through.trace.calls[self._depth]
        self._node, self._depth = node, self._depth + 1
        if self._reads.collects:
            module = self._view.module_of(unit)
            self._functions = hash((self._functions, unit, standing_of(module, numbers=False)))
            self._standing = hash((self._standing, unit, standing_of(module)))
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
            args, kwargs = self._view.fresh(batch[0]), self._view.fresh(batch[1])
            run.rehearse(step.function, args, kwargs, step.returned_of_whole)

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
            reads.asks, reads.compares = run.asks

    @contextmanager
    def _answering(self, run: Replay) -> Iterator[None]:
        self.patches.runner, self._view.mode.watcher = run, run
        try:
            with self._view.current_step().context(), reentrant_checkpoint_replaced(lambda: run.inside):
                yield
        finally:
            self.patches.runner = self._view.mode.watcher = None
            run.close()
