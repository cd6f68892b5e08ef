"""Which units a micro-batch calls, where that varies: by epoch, a drawn number, or what is in the batch.

Every stage finds it out alike before the batch begins: it runs the code between the units with placeholders
and the random numbers of the micro-batch. A way that was not seen before is traced then.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import (
    NO_CALLS,
    Calls,
    Liveness,
    Microbatch,
    Partition,
    Reads,
    Route,
    StepRoutes,
    TracedOutput,
    TracedOutputs,
    goes_on,
    misfit,
)
from lightning_pipeline.model.places import (
    Decisions,
    Effect,
    Findings,
    Owner,
    Place,
    Replayed,
    Surroundings,
    with_noted_index,
    with_sealed_index,
)
from lightning_pipeline.model.random import Generators, MicrobatchSeeds, random_state_kept
from lightning_pipeline.model.rehearsal.size_laws import SizeLaws
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.state import CannotRepeatError
from lightning_pipeline.model.tensors import (
    FormSeen,
    WritesSeen,
    is_placeholder,
    put_back,
    result_dtypes,
    standing_tensors,
    storage_key,
    tensors_held,
    version_of,
)
from lightning_pipeline.model.trace import (
    Call,
    Trace,
    numbers_beside,
    numbers_changed,
    other_answers,
    plain_state,
    updates_of_metrics,
)
from lightning_pipeline.registry import named_parameters_of, parameters_of

_MOST_DECIDED = 1024


class RouteFinder:
    """Finds the ways of the micro-batches of each batch.

    Args:
        root: The LightningModule.
        cut: Its partition.
        needed: The stages that hold each parameter and buffer.
        walk: Runs a step without any unit, to see which units it calls; None where the way is not known.
        traced: Traces a step with a micro-batch and its random numbers; calls of these traces are known.
        traced_like: Gives a trace with a micro-batch of this form, which may be an earlier one.
        apart: Inside, a run of a step leaves nothing behind.
        in_silence: Inside, a run of a step logs nothing.
        forget: Told of a step that leaves more behind than was seen.
        others: What a step may change beside the module.
        findings: What is found once for the runs with which a batch begins.

    Attributes:
        torn: Steps that decide by the batch, otherwise for one micro-batch than for another.
        called: For each micro-batch of the last look what tells the functions it called; 0: nobody knows.
    """

    def __init__(
        self, root: nn.Module, cut: Partition, needed: Mapping[str, Sequence[int]], *,
        walk: Callable[[Microbatch, Callable[[], MicrobatchSeeds], StepRoutes, "Reads"], Route | None],
        traced: Callable[[str, Microbatch, MicrobatchSeeds | None, Sequence[Call]], Trace],
        traced_like: Callable[..., Trace],
        apart: Callable[[str], AbstractContextManager[None]],
        in_silence: Callable[[], AbstractContextManager[None]],
        forget: Callable[[str], None],
        others: Callable[[], Sequence[Owner]],
        findings: Findings,
    ) -> None:  # fmt: skip
        self._others, self._findings = others, findings
        self._generators = findings.of(lambda: Generators(self._all_modules))
        self._root, self._cut, self._needed, self._walk = root, cut, needed, walk
        self._traced, self._traced_like, self._apart = traced, traced_like, apart
        self._in_silence, self._forget = in_silence, forget
        self._outputs: dict[Hashable, TracedOutputs] = {}
        self._laws: dict[Hashable, SizeLaws] = {}
        self._steps: dict[str, StepRoutes] = {}
        self._generation = 0
        self._flags: tuple[bool, ...] = ()  # that the last look has read
        self._called = NO_CALLS  # of the last whole look
        self.torn: set[str] = set()
        self.called: list[Calls] = []
        self._list_modules()

    def _list_modules(self) -> None:
        units = [unit.module for unit in self._cut.trace.units]
        inside = {id(part) for unit in units for part in unit.modules()} - set(map(id, units))
        self._all_modules: list[nn.Module] = list(self._root.modules())
        self._modules = [module for module in self._all_modules if id(module) not in inside]
        self._updates = updates_of_metrics(self._root)
        self._at_start = plain_state(self._root, self._modules, set())

    def forget(self) -> None:
        """The module has changed: no way is known, and what is sent on the next ones is other than before."""
        self._steps.clear()
        self._outputs.clear()
        self._laws.clear()
        self._generation += 1
        self._findings.forget()
        self._list_modules()

    def of_step(self, trace: Trace, liveness: Liveness) -> StepRoutes:
        """The ways of a step that was traced."""
        known = self._steps.get(trace.step)
        if known is None:
            known = self._steps[trace.step] = StepRoutes(self._route(0, trace, liveness), self._modules)
            state = known.state(self._root)
            if trace.leaves is not None and not trace.effects and state[0] == self._at_start:
                known.decided[trace.leaves, state, tuple(trace.decisions.values())] = known.base, NO_CALLS
        return known

    def _route(self, number: int, trace: Trace, liveness: Liveness) -> Route:
        stage_of = self._cut.stage_of
        ends = tuple(goes_on(trace, stage_of, stage) for stage in range(self._cut.num_stages))
        return Route(number, trace, liveness, ends)

    def routes(
        self, routes: StepRoutes, microbatches: Sequence[Microbatch],
        seeds: Callable[[int], MicrobatchSeeds],
        begun: Callable[[int], AbstractContextManager[None]] = lambda number: nullcontext(),
    ) -> list[Route]:  # fmt: skip
        """The way of each micro-batch.

        Args:
            routes: Of the step.
            microbatches: Arguments of each.
            seeds: Sets the random numbers of a micro-batch.
            begun: Inside, what it begins with is there.
        """
        if not routes.index_tried:
            routes.index_tried = True
            with begun(0):
                self._try_index(routes, microbatches[0], partial(seeds, 0))
                self._try_counters(routes, microbatches[0], partial(seeds, 0))
                self._try_numbers(routes, microbatches[0], partial(seeds, 0))
        state, finds = routes.state(self._root), self._by_key
        keys = [routes.key(microbatch, state) for microbatch in microbatches]
        found: list[Route | None] = [None] * len(microbatches)
        flags: list[tuple[bool, ...]] = [()] * len(microbatches)
        called = self.called = [NO_CALLS] * len(microbatches)
        if routes.base.trace.steered:
            finds = self._by_reads
            for number, key in enumerate(keys):
                found[number], flags[number], called[number] = routes.by_form.get(key, (None, (), NO_CALLS))
            with self._glancing() if None in found else nullcontext():
                for number, microbatch in enumerate(microbatches):
                    if found[number] is None:
                        at = partial(seeds, number)
                        with begun(number):
                            found[number] = self._glance(routes, keys[number], microbatch, at)
                            flags[number], called[number] = self._flags, self._called
        for number, microbatch in enumerate(microbatches):
            if found[number] is None:
                self._called = NO_CALLS
                with begun(number):
                    found[number] = finds(routes, keys[number], microbatch, partial(seeds, number))
                    flags[number], called[number] = self._flags, self._called
                functions = self._called.functions
                if len(found) > 1 and functions and functions not in routes.called:
                    routes.called.add(functions)
                    routes.unlooked.append(number)
        if len(set(flags)) > 1:
            self.torn.add(routes.base.trace.step)
        return [route for route in found if route is not None]

    def _try_index(
        self, routes: StepRoutes, microbatch: Microbatch, seeds: Callable[[], MicrobatchSeeds]
    ) -> None:
        """Whether the index of the batch goes where no comparison is seen, as into a seed or into a list.

        The step is run with an object in the place of the index of which C code can make no number.
        """
        decisions, reads = Decisions(), Reads()
        sealed = with_sealed_index(microbatch[0], decisions), microbatch[1]
        if sealed[0] is microbatch[0] or routes.follows_index:
            return
        step, effects = routes.base.trace.step, routes.base.trace.effects
        try:
            with self._numbers_kept(), self._in_silence(), _values_kept(effects), self._apart(step):
                route = self._walk(sealed, seeds, routes, reads)
        except CannotRepeatError:
            return
        if reads.failed is not None or route is not routes.base or decisions.labels():
            routes.hide_index()

    def _try_counters(
        self, routes: StepRoutes, microbatch: Microbatch, seeds: Callable[[], MicrobatchSeeds]
    ) -> None:
        """The same of whole numbers that the step counts itself, of which a list takes the value unseen."""
        step, effects = routes.base.trace.step, routes.base.trace.effects
        places = [place for place in numbers_changed(effects) if type(place.get()) is int]
        held, decisions = [(place, place.get()) for place in places], Decisions()
        if not places:
            return
        try:
            with self._numbers_kept(), self._in_silence(), _values_kept(effects), self._apart(step):
                for place, value in held:
                    place.put(decisions.sealed(value, place.label))
                self._walk(microbatch, seeds, routes, Reads())
        except CannotRepeatError:
            return
        finally:
            for place, value in held:
                place.put(value)
        routes.decides(decisions, places)

    def _try_numbers(
        self, routes: StepRoutes, microbatch: Microbatch, seeds: Callable[[], MicrobatchSeeds]
    ) -> None:
        """What the step does where it reads numbers of units, and they are much larger or smaller."""
        if routes.base.trace.compares:
            self._find(routes, microbatch, seeds, Reads())

    def _by_key(
        self, routes: StepRoutes, key: Hashable, microbatch: Microbatch,
        seeds: Callable[[], MicrobatchSeeds],
    ) -> Route:  # fmt: skip
        """The way of one micro-batch of a step where no number is read between units."""
        route, self._called = routes.decided.get(key, (None, NO_CALLS))
        if route is None:
            route = self._find(routes, microbatch, seeds, Reads())
            routes.found(microbatch)
            if len(routes.decided) > _MOST_DECIDED:
                routes.decided.clear()
            routes.decided[self._key(routes, microbatch)] = route, self._called
        return route

    def _glance(
        self, routes: StepRoutes, key: Hashable, microbatch: Microbatch,
        seeds: Callable[[], MicrobatchSeeds],
    ) -> Route | None:  # fmt: skip
        """The way of one micro-batch, where the numbers that are read are those of one before.

        The step is run up to the last number that is read. Nothing was left behind up to there when these
        numbers were first met, so there is nothing to put back.
        """
        known = Reads(routes.by_reads, key)
        if (key, ()) in routes.by_reads:
            self._walk(microbatch, seeds, routes, known)
        self._flags = known.flags()
        self._called = NO_CALLS
        if known.leads_to is not None:
            self._called = routes.called_by.get((key, tuple(known.values)), NO_CALLS)
        return known.leads_to

    def _by_reads(
        self, routes: StepRoutes, key: Hashable, microbatch: Microbatch,
        seeds: Callable[[], MicrobatchSeeds],
    ) -> Route:  # fmt: skip
        """The way of one micro-batch of a step where numbers are read between units, which may be new."""
        with self._glancing():
            known = self._glance(routes, key, microbatch, seeds)
        if known is not None:
            return known
        reads = Reads()
        route = self._find(routes, microbatch, seeds, reads)
        self._flags = reads.flags()
        if len(routes.by_reads) > _MOST_DECIDED:
            routes.by_reads.clear()
            routes.called_by.clear()
        if len(routes.by_form) > _MOST_DECIDED:
            routes.by_form.clear()
        if reads.tell_all and not reads.changed and reads.by_form:
            routes.by_form[self._key(routes, microbatch)] = route, self._flags, self._called
        elif reads.tell_all and not reads.changed:
            key = self._key(routes, microbatch)
            for number in range(len(reads.values)):
                routes.by_reads.setdefault((key, tuple(reads.values[:number])))
            routes.by_reads[key, tuple(reads.values)] = route
            routes.called_by[key, tuple(reads.values)] = self._called
        return route

    def _key(self, routes: StepRoutes, microbatch: Microbatch) -> Hashable:
        return routes.key(microbatch, routes.state(self._root))

    def _find(
        self, routes: StepRoutes, microbatch: Microbatch, seeds: Callable[[], MicrobatchSeeds],
        reads: Reads,
    ) -> Route:  # fmt: skip
        """The way of one micro-batch, by a walk that takes the numbers that are read, or by a trace."""
        step = routes.base.trace.step
        with self._numbers_kept():
            known = self._look(routes, microbatch, seeds, reads)
            if not isinstance(known, list):
                return known
            reads.tell_all = False  # the run ended there
            try:
                trace = self._traced(step, microbatch, seeds(), routes.calls)
            except SplitError:
                if reads.failed is not None:
                    return reads.failed
                raise
            self._check_weights(trace, known)
            route = self._learned(routes, trace, known)
            self._look(routes, microbatch, seeds, Reads())  # by which numbers it decides on this way
        return route

    def _look(
        self, routes: StepRoutes, microbatch: Microbatch, seeds: Callable[[], MicrobatchSeeds],
        reads: Reads,
    ) -> Route | list[Hashable]:  # fmt: skip
        """The way of one micro-batch; of one that is new, or on which more is left behind, what more.

        Where code reads what units compute, and may choose by it, what more there is if it chooses otherwise.
        """
        found, called = self._look_once(routes, microbatch, seeds, reads), self._called
        others = other_answers(asked=reads.asks, compares=reads.compares)
        if isinstance(found, list) or not others or not routes.looks_otherwise:
            return found
        routes.looks_otherwise -= 1
        for answers in others:
            other = Reads(answers=answers)
            more = self._look_once(routes, microbatch, seeds, other)
            if isinstance(more, list) and more:
                return more
            if more is found and reads.places is not None and other.places is not None:
                routes.decided_by_value(reads.places ^ other.places)
        self._called = called
        return found

    def _look_once(
        self, routes: StepRoutes, microbatch: Microbatch, seeds: Callable[[], MicrobatchSeeds],
        reads: Reads,
    ) -> Route | list[Hashable]:  # fmt: skip
        """One such look; no more is said of a run that fails or goes another way by other answers."""
        step, effects = routes.base.trace.step, routes.base.trace.effects
        decisions, others = Decisions(), self._others()
        numbers = [*numbers_beside(others), *self._updates, *numbers_changed(effects)]
        noted = with_noted_index(microbatch[0], decisions), microbatch[1]
        around = Surroundings(self._root, others)
        standing = (tensor for _, value in around.standing() for tensor in standing_tensors(value))
        writes, form = WritesSeen([*parameters_of(self._root), *self._root.buffers(), *standing]), FormSeen()
        try:
            with _values_kept(effects), self._apart(step), decisions.noting(numbers):
                around.look()
                changed = _Changed(around)
                reads.changes = self._changes(effects, writes, changed)
                reads.on_call, reads.on_value = changed.look, changed.value_read
                try:
                    with writes, form:
                        route = self._walk(noted, seeds, routes, reads)
                finally:
                    writes.restore()
                reads.by_form &= form.holds and not any(numbers_changed(effects))
                changed.look()
                self._called = reads.called
                reads.places = {place.identity for place, _ in changed.places}
                more = routes.unknown(changed.places, writes.written, changed.by_values())
        except CannotRepeatError:
            reads.tell_all = False
            return routes.base
        finally:
            routes.looked(decisions, numbers)
        is_new = route is None or reads.failed is not None
        if reads.answers and is_new:
            return []
        return more if route is None or is_new or more else route

    def _check_weights(self, trace: Trace, more: Sequence[Hashable]) -> None:
        """Weights that are first written now need stages that hold what they are made of: those are cut."""
        weights = [(("written", storage_key(p)), name) for name, p in named_parameters_of(self._root)]
        found = [name for place, name in weights if place in more]
        reason = misfit(trace, self._cut, self._needed) if found else ""
        if reason:
            raise SplitError(
                f"{trace.step} changes {found[0]!r} in place in this batch, and in none before, by which the "
                f"model was cut: {reason}. Do so in a hook such as on_train_batch_end, or in every batch"
            )

    def _learned(self, routes: StepRoutes, trace: Trace, more: Sequence[Hashable]) -> Route:
        """One more trace."""
        step = trace.step
        base = routes.base.trace
        base.assumed = base.assumed._replace(few=base.assumed.few or trace.assumed.few)  # else each look ends
        if routes.learn(trace, more):
            self._forget(step)
            known_ways = list(routes.known.values())
            live = [self._cut.liveness(one.trace) for one in known_ways]
            if any(one.liveness != now for one, now in zip(known_ways, live, strict=True)):
                self._generation += 1  # messages are others
            routes.put(
                [self._route(one.number, one.trace, now) for one, now in zip(known_ways, live, strict=True)]
            )
        if (known := routes.known.get(trace.way)) is None:
            self._check(trace)
            known = self._route(len(routes.known), trace, self._cut.liveness(trace))
            if routes.add(known):
                self._forget(step)
        return known

    def traced(self, step: Step, number: int) -> Trace:
        """A trace with a micro-batch of a batch and its random numbers."""
        with self._numbers_kept():
            seeds = step.seeds.microbatch(number)
            return self._traced(step.name, step.microbatches[number], seeds, step.ways.calls)

    def context(self, step: str) -> tuple[Hashable, ...]:
        """What units return depends on this beside their arguments."""
        return step, self._generation, torch.is_grad_enabled(), result_dtypes(), self._root.training

    def signatures(
        self, step: str, routes: Sequence[Route], microbatches: Sequence[Microbatch]
    ) -> list[Hashable]:
        """What determines the metadata between stages, for each micro-batch on its way."""
        context = self.context(step)
        return [
            (*context, signature_of(args, kwargs), *((route.number,) if route.number else ()))
            for route, (args, kwargs) in zip(routes, microbatches, strict=True)
        ]

    def on_some_stages(self) -> list[Tensor]:
        """Parameters and buffers that not every stage has."""
        every = set(range(self._cut.num_stages))
        named = (*named_parameters_of(self._root), *self._root.named_buffers())
        return [tensor for name, tensor in named if set(self._needed.get(name, ())) != every]

    def as_one(self, step: Step, whole: Microbatch) -> tuple[Trace, dict[tuple[int, int], TracedOutput]]:
        """The trace of a batch in one, and what units return for it.

        Args:
            step: The batch.
            whole: Its arguments as one.
        """
        seeds = partial(step.seeds.microbatch, 0)
        (route,) = self.routes(step.ways, [whole], lambda _: seeds())
        return route.trace, self.outputs(route, whole, seeds)

    def outputs(
        self, route: Route, batch: Microbatch, seeds: Callable[[], MicrobatchSeeds], *, anew: bool = False
    ) -> TracedOutputs:  # fmt: skip
        """What units return for arguments of these shapes, on this way.

        Args:
            route: The way.
            batch: The arguments.
            seeds: Sets the random numbers of the micro-batch.
            anew: Whether by their values.
        """
        shapes, trace = signature_of(*batch), route.trace
        if anew or trace.follows_values:  # such as an encoder that cuts its input to a length
            with self._numbers_kept():
                return TracedOutputs(self._traced(trace.step, batch, seeds(), ()).calls)
        key = (*self.context(trace.step), route.number, shapes)
        if key not in self._outputs:
            self._outputs[key] = TracedOutputs(self._calls(key[:-1], trace, batch, seeds))
        return self._outputs[key]

    def _calls(
        self, known: Hashable, trace: Trace, batch: Microbatch, seeds: Callable[[], MicrobatchSeeds]
    ) -> Sequence[Call]:
        """Calls of units with arguments of these shapes, which are traced if no law gives them."""
        shapes, step = signature_of(*batch), trace.step
        if trace.arguments == shapes:
            return trace.calls
        with self._numbers_kept():
            if self._steps[step].varies:
                return self._traced(step, batch, seeds(), ()).calls
            laws = self._laws.setdefault(known, SizeLaws())
            by_law = None if trace.steered or trace.ended_early else laws.calls(shapes)
            if by_law is not None:
                return by_law
            for one in (trace, like := self._traced_like(step, batch, outputs_alone=True)):
                laws.learn(one)
            return like.calls

    def _changes(
        self, effects: Sequence[Effect], writes: WritesSeen, changed: "_Changed"
    ) -> Callable[[], bool]:
        """What tells whether anything has changed since; of a step that writes weights it has."""
        if any(isinstance(effect.place.get(), nn.Parameter) for effect in effects if effect.deep):
            return lambda: True
        return lambda: bool(changed.now() or writes.written)

    @contextmanager
    def _glancing(self) -> Iterator[None]:
        """For looks up to the last number that is read: as many as there are micro-batches in one."""
        with self._numbers_kept(), self._in_silence():
            yield

    def _numbers_kept(self) -> AbstractContextManager[None]:
        """For a look at a micro-batch, which sets its random numbers, and where the step may set some."""
        return random_state_kept(self._generators())

    def _check(self, trace: Trace) -> None:
        """Refuse a way that the stages, as they are, cannot go."""
        reason, units = misfit(trace, self._cut, self._needed), trace.units
        if reason:
            called = {call.unit for call in self._cut.trace.calls}
            new = [units[unit].name for unit in dict.fromkeys(trace.path) if unit not in called]
            more = f", which calls {new}" if new else ""
            raise SplitError(
                f"{trace.step} takes another way through the model than the one that it was cut by{more}: "
                f"{reason}. Choose a partition that keeps these together, or let every rank run steps whole: "
                "PipelineStrategy(whole_steps=True)"
            )


@contextmanager
def _values_kept(effects: Sequence[Effect]) -> Iterator[None]:
    """For a run of a step that writes tensors in place or takes from iterators: these are put back."""
    iterators = [one for effect in effects if isinstance(one := effect.place.get(), Replayed)]
    places = [iterator.at for iterator in iterators]
    found = [effect.place.get() for effect in effects if effect.deep]
    here = [one for one in found if isinstance(one, Tensor) and not (is_placeholder(one) or one.is_meta)]
    kept = [(tensor, tensor.detach().clone(), version_of(tensor)) for tensor in here]
    try:
        yield
    finally:
        for tensor, before, version in kept:
            put_back(tensor, before, version)
        for iterator, place in zip(iterators, places, strict=True):
            iterator.at = place


class _Changed:
    """Notes what a run of a step changes, and how many calls of units there had been.

    Args:
        around: What it may change.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around, self._calls, self._is_read = around, 0, False
        self._by_values = set[Hashable]()
        self.places: list[tuple[Place, int]] = []

    def look(self) -> None:
        """A unit is called, or the step is over."""
        self.now()
        self._calls += 1

    def now(self) -> list[tuple[Place, int]]:
        """All that is changed up to now."""
        found = self._around.look()
        self.places += [(place, self._calls) for place in found]
        self._by_values.update({place.identity for place in found if self._is_read})
        return self.places

    def value_read(self) -> None:
        """A value of units is read."""
        self.now()
        self._is_read = True

    def by_values(self) -> set[Hashable]:
        """Places, by identity, where something stands now that may depend on what units give."""
        tensors = {
            place.identity for place, _ in self.places if any(map(is_placeholder, tensors_held(place.get())))
        }
        return self._by_values | tensors
