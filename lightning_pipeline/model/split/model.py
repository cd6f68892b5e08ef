"""A LightningModule cut into stages, as one rank holds it."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.data import merge_outputs
from lightning_pipeline.model.cut import (
    Microbatch,
    Partition,
    Route,
    TracedOutput,
    check_ways,
)
from lightning_pipeline.model.loss import Part, check_no_class_weights
from lightning_pipeline.model.places import Guard, Owner, Place, Replayed
from lightning_pipeline.model.random import StepSeeds
from lightning_pipeline.model.rehearsal import Rehearsals
from lightning_pipeline.model.replay import Sink, Step, StepResult, Told, WholeBatch
from lightning_pipeline.model.rules import Merge
from lightning_pipeline.model.split.known_steps import Doubts, KnownSteps
from lightning_pipeline.model.split.left_behind import LeftBehind
from lightning_pipeline.model.split.outside_steps import IdleRunner, OutsideSteps
from lightning_pipeline.model.split.programs import Programs
from lightning_pipeline.model.state import (
    Apart,
    AttributeGuards,
    FromLast,
    Gradients,
    Sent,
    StepState,
    is_told_as_attribute,
    left_in,
    put_in,
)
from lightning_pipeline.model.tensors import (
    Held,
    Peaks,
    SavedCount,
)
from lightning_pipeline.model.trace import Trace, step_function


class SplitModel(OutsideSteps):
    """This rank's stages of a module, with every patch that replay needs.

    Args:
        root: The LightningModule, whole.
        cut: Its partition.
        stages: The stages of this rank.
        sinks: What `root.log(...)` and the like become on the last stage: called with the micro-batch's
            index and the user's arguments.
        forward_context: Makes the precision's context for one forward, such as autocast.
        seed: Base of all random draws inside steps; the same on every rank.
        later: Traces of other steps, made when the module was whole; what has none is traced when it comes.
        others: What a step may change beside the module.
        device: Where the steps run.
        loss_over_batch: Whether what follows the last unit runs once for all micro-batches.

    Attributes:
        counts_next: Whether to count what the stages hold in the next step that has a backward.
        beside: Gives objects that a step may change beside the module, such as optimizers.
        looks_again: Whether steps use what is there from the first batch on only, such as optimizers.
        set_aside: While a step is run once more than on one device, keeps what it would tell loggers.
        told: What steps tell loggers and metrics.
        known: What is known of each step.
        programs: What runs the stages of this rank.
        as_one: What steps tell of some batches as one.
        in_units: What units keep of their own.
        scaled: Makes what a backward begins with larger, as a gradient scaler does.
        count: That of the last step in which it was counted.
        worst: The worst moment of all steps in which it was.
        begun: How many batches were.
    """

    def __init__(
        self, root: nn.Module, cut: Partition, stages: Sequence[int], *,
        sinks: Mapping[str, Sink] | None = None, seed: int = 0,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        later: Sequence[Trace] = (),
        others: Callable[[], Sequence[Owner]] = tuple,
        device: torch.device | None = None,
        loss_over_batch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(root, cut, stages, device or torch.device("cpu"))
        self.forward_context, self.seed = forward_context, seed
        self.num_stages = cut.num_stages
        last = self.num_stages - 1 in stages
        self.told = Told(
            root, sinks or {}, self.mode, self._device,
            has_last_stage=last, follower=lambda: None if self._step is None else self._step.follower,
        )  # fmt: skip
        self.programs = Programs(
            root, self._patches, self.mode, self._stage_of, stages, self.num_stages,
            loss_over_batch=loss_over_batch,
        )  # fmt: skip
        self._guards = AttributeGuards()
        self._others = others = self.findings.of(others)
        self.known = KnownSteps(
            root, cut, later, patches=self._patches, mode=self.mode, context=forward_context,
            sinks=lambda: self.told.names, others=others, lifted=self._guards.lifted, device=self._device,
            aside=lambda: self.set_aside(),
        )  # fmt: skip
        self._modules = list(root.modules())
        self._earlier: list[Trace] = []  # of the module as it was before it changed
        self.scaled: Callable[[Tensor], Tensor] = lambda seed: seed
        self.beside: Callable[[], Iterable[Any]] = list
        self.looks_again = False
        self.set_aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._apart = Apart(root, lambda: self.beside(), self._others)
        self._open: ExitStack | None = None
        self._step: Step | None = None
        self._state: StepState | None = None
        self._left_behind = LeftBehind(
            root, cut, self._patches, stages, stage_of=self._stage_of, device=self._device,
            traced=self.known.traced, traced_like=self.known.traced_like, guards=self._guards, others=others,
            quiet=self._quiet, part_of=self.told.part,
        )  # fmt: skip
        self.in_units = self._left_behind.in_units
        self._sizes: Sequence[int] = ()  # samples of the micro-batches of the last batch
        rehearsals = Rehearsals(
            root, cut, self._residence.needed, self._patches, self.told, self._apart,
            first=self.programs.first_view, last=self.programs.last_view,
            traced=self.known.traced, traced_like=self.known.traced_like,
            apart=self._apart_in_silence, in_silence=self._in_silence, quiet=self._quiet,
            forget=self._left_behind.forget, begun=self._left_behind.begun, others=others,
            findings=self.findings, stage_of=self._stage_of, stages=stages,
        )  # fmt: skip
        self._finder, self._mixing = rehearsals.ways, rehearsals.mixed
        self._divisors, self.as_one = rehearsals.divisors, rehearsals.as_one
        self._mixed_values, self._padding = rehearsals.values, rehearsals.values.padding
        self._mixing_units, self._buffers = rehearsals.mixing_units, rehearsals.buffers
        self._row_order = rehearsals.row_order
        self.signatures: list[Hashable] = []
        self.begun, self.counts_next, self.is_unlike = 0, False, False
        self.count: SavedCount | None = None
        self.worst = Peaks()
        self._install()
        self.watch_growth()

    def _install(self) -> None:
        self._residence.drop()
        self._patches.install()
        self._patches.idle = IdleRunner(
            self.root, self._patches, self.programs.first_view, self.programs.here
        )  # fmt: skip
        for program in self.programs:
            if not program.counts:
                program.apart = self.told.silent_metrics

    def restore(self, states: Mapping[str, Tensor] | None = None, *, on_meta: bool = False) -> None:
        """Undo every patch.

        Args:
            states: Values of parameters and buffers of other stages, by name; those without one keep no
                values, and using them raises.
            on_meta: Whether those are left on the meta device, in their shapes.
        """
        self.failed()
        self._patches.remove()
        self._registration.remove()
        self._guards.remove()
        for trace in (*self._earlier, *self.known.traces):
            for effect in trace.effects:
                if isinstance(value := effect.place.get(), Replayed):
                    effect.place.put(value.rest())
        self._residence.restore(states or {}, on_meta=on_meta)

    def changed(self) -> None:
        """What hooks have added to the module is on its stages: find out anew what steps do."""
        self.guard_modules()
        self._modules = list(self.root.modules())
        self.told.changed()
        self.in_units.changed()
        self.programs.changed(self._modules, self._stage_of)
        for trace in self.known.forget():
            self._earlier.append(trace)
            self._left_behind.forget(trace.step, keeps=False)
        self._finder.forget()
        if self.programs.over_batch is not None:
            self.programs.over_batch.forget(self._stage_of)

    def lacks(self, step: str) -> dict[str, set[int]]:
        """Parameters that a known step reads on stages that have no copy, by name, with these stages.

        One that reads what hooks set is traced when it comes, and the module is cut by then.
        """
        return self.known.lacks(step, self._residence.needed, self._stage_of)

    def compile_units(self, compiles: Callable[[Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Let the forwards of this rank's units be compiled ones, until the end.

        Args:
            compiles: Compiles a function; None leaves them as they are.
        """
        originals = self._patches.originals
        for unit, stage in enumerate(self._stage_of):
            if compiles is not None and stage in self.programs.here:
                originals[unit] = compiles(originals[unit])

    # ---- what this rank holds

    def modules_run(self) -> Iterator[tuple[str, nn.Module, int]]:
        """Every unit and module in one, with its name and the stage that runs it."""
        for unit, stage in zip(self._patches.units, self._stage_of, strict=True):
            for name, part in unit.module.named_modules(prefix=unit.name):
                yield name, part, stage

    @property
    def has_last_stage(self) -> bool:
        """Whether losses, logs and outputs arrive here."""
        return self.programs.has_last_stage

    def has_late_attributes(self, step: str) -> bool:
        """Whether a step that has been traced leaves attributes that depend on what units return."""
        return step in self.known and any(
            effect.from_units and is_told_as_attribute(effect) for effect in self.known[step].effects
        )

    @property
    def leaves_late(self) -> bool:
        """Whether any step does, see `has_late_attributes`; alike on all ranks."""
        return self.num_stages > 1 and bool(self._late_places())

    def left_so_far(self, largest: int | None = None) -> tuple[dict[str, Sent], list[str]]:
        """On the last stage, after a batch: attributes that steps left from what units return.

        Args:
            largest: Bytes that they may have together.

        Returns:
            By name, and the names of those that cannot be sent.
        """
        places = [place for place in self._late_places() if not isinstance(place.get(), Guard)]
        return left_in(places, largest)

    def take(self, left: Mapping[str, Sent]) -> None:
        """On the other ranks, between batches or once restored: have the same."""
        places = [place for place in self._late_places() if place.label in left]
        self._guards.release(places)
        put_in(places, left, self._device)

    def _late_places(self) -> list[Place]:
        effects = (effect for trace in self.known.traces for effect in trace.effects)
        return list(
            {e.place.label: e.place for e in effects if e.from_units and is_told_as_attribute(e)}.values()
        )

    def returns_more(self, step: str) -> bool:
        """Whether a step returns other entries than `loss`, which the last stage has."""
        return self.known[step].ended_early or any(key != "loss" for key in self.known[step].returned)

    def late_states(self, step: str) -> list[str]:
        """Names of tensors that the end of a step writes on the last stage, and other stages have too."""
        if self.num_stages == 1:
            return []
        trace = self.known[step]
        late = [effect.place.label for effect in trace.effects if effect.deep and effect.from_units]
        last = (self.num_stages - 1,)
        return trace.late_states + [n for n in late if n in trace.state_units and self.stages_of(n) != last]

    def doubts(self, step: str) -> Doubts:
        """After a batch of a step: what may not be one device's."""
        trace, left, mends = self.known[step], self._left_behind, self._mixing.mended
        end = len(trace.calls) + (self.programs.over_batch is None)  # else what comes last runs once
        mixed = {} if mends else {line: one for line, one in trace.mixed.items() if one[1] < end}
        partly = trace.mixed.items() if step in self._mixing.partly else ()
        return Doubts(
            states=[label for label in left.doubts(step) if not (mends and label in self._known_left)],
            has_unknown=self._state is not None and self._state.parts.has_unknown,
            untried=left.not_tried.get(step),
            decided_by=left.decided_by.get(step, []),
            sums_read=left.sums_read.get(step, []),
            decides_apart=step in self._finder.torn and not mends,
            are_units_apart=self._mixing.are_units_apart,
            ended_early=trace.ended_early,
            mixed={line: name for line, (name, _) in mixed.items()},
            at_end=all(position >= len(trace.calls) for _, position in mixed.values()),
            in_part={line: name for line, (name, _) in partly},
            values=self._mixed_values.lines.get(step, {}),
            padded=self._padding.counted.get(step, []),
            padded_inside=self._padding.inside.get(step, []),
            units=self._mixing_units.found.get(step, []),
            seeded_at="" if mends else trace.seeded_at,
            numbers=self._mixing_units.numbers.get(step, {}),
        )

    def _mends(self, trace: Trace, sizes: Sequence[int]) -> bool:
        """Whether the micro-batches of a step get their samples of what it mixes."""
        return len(sizes) > 1 and self.programs.end < self.num_stages and self._mixing.mends(trace, sizes)

    # ---- a batch

    def begin(
        self,
        step: str,
        microbatches: Sequence[Microbatch],
        *,
        weights: Sequence[float] | None,
        key: Sequence[int],
        replica: int = 0,
        split_backward: bool = False,
        whole: WholeBatch | None = None,
        sizes: Sequence[int] | None = None,
        merge: Merge = merge_outputs,
        at_once: Microbatch | None = None,
    ) -> None:
        """Get ready to run a batch; a kind of step that was not seen yet is traced first.

        Args:
            step: Name of the user's method.
            microbatches: Arguments and keyword arguments for each.
            weights: What each loss is multiplied with for the backward; None where none follows.
            key: Numbers that name the batch, such as epoch and batch index; random draws follow from them.
            replica: Index of the data-parallel replica.
            split_backward: Whether the plan has I and W actions.
            whole: The batch as one, where the divisors of what is logged are to be followed, and of a loss
                that the user has not weighed; `weights` then are those of what has none.
            sizes: Samples of each micro-batch; None: alike.
            merge: Merges one value per micro-batch.
            at_once: The batch as one, where the loss is computed over all of it.
        """
        assert self._open is None, "the batch before was not finished"
        self.begun += 1
        self._module_guards.check()
        trace, liveness = self.known.of(step, microbatches[0], again=self.looks_again)
        self.told.begin()
        self._left_behind.watch(trace)
        self.in_units.begin(trace)
        ways = self._finder.of_step(trace, liveness)
        seeds = StepSeeds(self._modules, (self.seed, sum(step.encode()), *key, replica))
        self._step = Step(
            step, step_function(self.root, step), microbatches, weights, ways, seeds,
            self.forward_context, self._at, split_backward, scaled=self.scaled,
            around_backward=self.around_backward, gradient_read=self.on_gradient_read,
            count=self._new_count(microbatches) if weights is not None else None,
            telling=self.told.lines.run, returned=self.told.returns,
            returned_of_whole=self.told.returns_of_whole,
        )  # fmt: skip
        self._open = ExitStack()
        self._open.callback(seeds.close)
        self._open.enter_context(self.told.in_step(several=len(microbatches) > 1))
        for program in self.programs:
            program.begin(self._step)
        sizes = self._sizes = self._step.sizes = sizes or [1] * len(microbatches)
        self._mixing.arrange(self._step, trace, at_once, sizes, mends=self._mends, find_ways=self._find_ways)
        self._check_ways(at_once, sizes)
        self._carried = set[tuple[int, Any]]().union(*(r.trace.carried() for r in ways.known.values()))
        as_one = partial(self._finder.as_one, self._step)
        self._find_row_order(at_once)
        self._known_left = self._step.left_by_batch or {}
        self._state = self._left_behind.new_state(
            trace, microbatches, sizes, merge, ways, at_once, as_one, self._known_left, self._mixing.mended
        )
        starts = self._buffers.starts(self._step, trace, at_once, as_one)
        for program in self.programs:
            program.state, program.starts = self._state, starts.get(program.index)
            program.unit_state = self.in_units.state(trace, program.index, sizes)
        self._total = sum(sizes)
        if at_once is not None and self.has_last_stage and len(microbatches) > 1:
            with self._left_behind.begun(None, sizes):
                self._mixed_values.look(self._step, at_once, sizes, as_one)
        over_batch, later = self.programs.over_batch, frozenset[int]()
        if over_batch is not None:
            assert at_once is not None, "a loss over the batch needs the batch"
            later = over_batch.begin(self._step, at_once, self._finder, self._state)
            last = self.programs[self.num_stages - 1]
            last.unit_state = self.in_units.state(trace, last.index, sizes, but=later)
        self._try_mixing(at_once, later)
        if whole is not None and not whole.is_weighed and weights is not None and len(microbatches) > 1:
            check_no_class_weights(step, trace.weighted_inside)
        if self.has_last_stage and len(microbatches) > 1 and over_batch is None:
            self._open.enter_context(self.told.metrics_by_batch(step, sizes))
        if whole is not None and self.has_last_stage and len(microbatches) > 1:
            with self._guards.lifted():
                self._divisors.follow(self._step, whole)
            self.as_one.know(self._left_behind.told_at_end)
            self.as_one.begin(self._step, self._state, whole.arguments, sizes, as_one)
            if self._state is not None:
                self._state.start_again()
        if self._step.mixing or self._step.follower is not None:
            self._open.enter_context(self.told.metrics_unfollowed())

    def _try_mixing(self, whole: Microbatch | None, later: Collection[int]) -> None:
        """Find out which units of this rank mix samples or count padding; `later` are given all."""
        step = self._step
        if step is None or whole is None or len(step.microbatches) == 1:
            return
        seeds = partial(step.seeds.microbatch, 0)
        outputs = partial(self._finder.outputs, step.routes[0], seeds=seeds)
        with self._left_behind.begun(None, self._sizes):
            self._padding.look(step, whole, self._sizes, partial(self._finder.as_one, step))
        with self._left_behind.begun(0, self._sizes):
            self._mixing_units.look(step, whole, self._sizes, outputs, later)

    def _check_ways(self, whole: Microbatch | None, sizes: Sequence[int]) -> None:
        """The sizes of micro-batches do not decide which units are called."""
        step = self._step
        if step is None or whole is None or len(sizes) == 1:
            return
        if step.trace.steered or not step.ways.goes_by_form:
            return
        with self._left_behind.begun(None, sizes):
            (route,) = self._finder.routes(step.ways, [whole], lambda _: step.seeds.microbatch(0))
        check_ways(route, step.routes, sizes)

    def _find_row_order(self, whole: Microbatch | None) -> None:
        """Find out how rows stand that have each sample several times."""
        step = self._step
        if step is None or whole is None or len(step.microbatches) == 1:
            return
        seeds = partial(step.seeds.microbatch, 0)
        outputs = partial(self._finder.outputs, step.routes[-1], seeds=seeds)
        with self._left_behind.begun(None, self._sizes):
            self._row_order.look(step, whole, self._sizes, partial(self._finder.as_one, step), outputs)

    def _find_ways(self, step: Step, sizes: Sequence[int], one: Route | None = None) -> None:
        """Which units each micro-batch calls, if not those of `one` way, and what a rank is to know."""
        begun = partial(self._left_behind.begun, sizes=sizes)
        found = self._finder.routes if one is None else lambda *_: [one] * len(sizes)
        step.routes = found(step.ways, step.microbatches, step.seeds.microbatch, begun)
        if one is None:
            step.called = [calls.functions for calls in self._finder.called]
        self.signatures = self._finder.signatures(step.name, step.routes, step.microbatches)
        step.later_outputs = []
        for number, (route, batch) in enumerate(zip(step.routes, step.microbatches, strict=True)):
            outputs: dict[tuple[int, int], TracedOutput] = {}
            if route.looks_ahead(self.programs.here):
                with begun(number):
                    outputs = self._finder.outputs(route, batch, partial(step.seeds.microbatch, number))
            step.later_outputs.append(outputs)

    @contextmanager
    def _apart_in_silence(self, step: str) -> Iterator[None]:
        with self._guards.lifted(), self._apart.running(step), self._in_silence():
            yield

    @contextmanager
    def _in_silence(self) -> Iterator[None]:
        """For runs of a step on placeholders."""
        with self.set_aside(), self.told.silent():
            yield

    @contextmanager
    def _quiet(self, by_copies: bool = False) -> Iterator[None]:
        """For runs of a step on made-up values."""
        with self.set_aside(), self.told.nothing(by_copies=by_copies), self.forward_context():
            yield

    # ---- what a batch leaves behind

    def settle(self, merge: Merge = merge_outputs) -> None:
        """After `finish`: let what the step leaves behind be what one device has after the batch.

        Args:
            merge: Merges one value per micro-batch.
        """
        inside = [program.unit_state for program in self.programs]
        for state in (self._state, *inside):
            if state is not None:
                state.settle(merge)
        self.in_units.settle(inside)

    def left(self) -> dict[str, Any]:
        """After `settle`, on the last stage: what is small of what the step has left, by label."""
        return {} if self._state is None else self._state.left()

    def put_left(self, left: Mapping[str, Any]) -> None:
        """After `settle`, on the last stage: let this be what it has left, by label."""
        if self._state is not None:
            self._state.put(left)

    def unforeseen(self, step: str) -> list[str]:
        """After `settle`, on the last stage: what values of units have let the step change."""
        places = [effect.place for effect in self.known[step].effects]
        places += [place for _, place in self.known[step].unit_attributes]
        known = {place.identity for place in places} | self._carried
        return self._left_behind.unforeseen(known, {place.label for place in places})

    @property
    def divided(self) -> Mapping[str, bool]:
        """After `settle`, on the last stage: what some micro-batches change. See `StepState`."""
        return self._state.divided if self._state is not None else {}

    def settled(self, step: str) -> None:
        """After all ranks have been told: what is carried on by rows has those of this batch."""
        self._left_behind.left(self.known[step], self._total)

    def fits(self, step: str, samples: int) -> bool:
        """Whether what a step carries on from batch to batch has a row for each sample of the next one.

        Args:
            step: Name of the user's method.
            samples: Of the batch.
        """
        return step not in self.known or self._left_behind.fits(self.known[step], samples)

    def left_on_last(self, step: str, batch: Microbatch) -> FromLast | None:
        """After `settle`, on the last stage: what every rank is to have.

        Args:
            step: That has run.
            batch: Its arguments, not split.
        """
        if self._state is None:
            return None
        return self._state.to_share(self._left_behind.read_early(self.known[step], self._state, batch))

    def take_from_last(self, shared: FromLast | None) -> None:
        """On the other ranks: have that too; what was not sent raises when it is read."""
        if self._state is not None and shared is not None:
            taken, rest = self._state.take(shared, self._device)
            self._guards.forget(effect.place for effect in taken)
            self._guards.install(e.place for e in rest if e.place.identity not in self._carried)

    def retains(self) -> bool:
        """After a batch: whether the step has asked for gradients of what it leaves behind."""
        return self._state is not None and self._state.retains

    def retained(self) -> Gradients:
        """After `take_from_last`: those that this rank has."""
        return {} if self._state is None else self._state.retained()

    def take_gradients(self, found: Sequence[Gradients]) -> None:
        """Have those that the ranks found."""
        if self._state is not None:
            self._state.take_gradients(found)

    def _new_count(self, microbatches: Sequence[Microbatch]) -> SavedCount | None:
        """Counts what the stages hold in this step, where that was asked for."""
        if not self.counts_next:
            return None
        self.count, self.counts_next = SavedCount.beside(self._modules, microbatches), False
        return self.count

    def counted_now(self) -> dict[int, Held] | None:
        """What each stage of this rank holds, where the step that is running counts it."""
        if self._step is None or self._step.count is None:
            return None
        self._step.count.settle()
        return self._step.count.held()

    def _at(self, microbatch: int) -> None:
        self.told.microbatch = microbatch

    def release_metrics(self, *, is_sure: bool) -> bool:
        """After the batch was looked at as one, on the last stage: see `MetricCalls.release`."""
        with self.forward_context():
            return self.told.calls.release(is_sure=is_sure)

    def finish(self) -> StepResult:
        """End the batch and hand out what the last stage has."""
        step = self._step
        assert step is not None, "begin() comes first"
        self.is_unlike = step.is_unlike
        if step.follower is not None:
            step.follower.end()
        if self.told.calls.waiting:
            with self.forward_context():
                self.told.calls.settle()
        if step.count is not None:
            step.count.settle()
            self.worst.rise_to(step.count.peaks)
        if self.programs.over_batch is not None:
            step = self.programs.over_batch.step
        self.failed()
        order = range(len(step.microbatches))
        changes = [step.batch_changes[i] for i in order if i in step.batch_changes]
        if not self.has_last_stage:
            return StepResult([], [], [], batch_changes=changes)
        return StepResult(
            [step.losses[i] for i in order],
            [step.results[i] for i in order],
            [step.parts.get(i) for i in order],
            *((None, lambda **_: None, None) if step.follower is None else step.follower.found()),
            changes,
        )

    def part(self, value: Any, *, always: bool = False) -> Part:
        """What a number of the micro-batch that runs is of the batch's. See `Follower.part`."""
        return self.told.part(value, always=always)

    def failed(self) -> None:
        """Drop the state of a batch, after an error too."""
        self.programs.stop()
        if self._open is not None:
            self._open.close()
        self._open, self._step = None, None
        self.settle_replaced()
        self.known.forget_recent()

    def sinks_to(
        self, record: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
    ) -> AbstractContextManager[None]:
        """Outside a step: give calls of `root.log(...)` and the like to `record`, with the method's name."""
        return self.told.to(record)
