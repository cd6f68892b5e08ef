"""What is noted while a step is traced, and what is known of it afterwards."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import in_a_transform, tree_leaves
from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.places import Effect, Expression, Noted, Owner, Place, metrics_of
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.tensors import (
    NOTHING,
    PlaceholderMode,
    SharedMemory,
    StandIns,
    Structure,
    Tag,
    TagStore,
    TensorSpec,
    Work,
    flags_of,
    is_changed,
    is_placeholder,
    storage_key,
    tensors_in,
    user_line,
)
from lightning_pipeline.model.trace.choices import NOTHING_ASSUMED, Assumed, plain_leaves
from lightning_pipeline.model.trace.patches import UnitPatches
from lightning_pipeline.model.trace.ports import Porting, PortPlace, PortSpec, Watch
from lightning_pipeline.model.trace.units import Unit

Inputs = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and types of the tensors that a unit is called with."""


def inputs_of(arguments: Any) -> Inputs:
    """Those of the tensors among arguments."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(arguments))


def turn_of(unit: int, asked: Structure) -> Hashable:
    """A unit and what of its arguments may choose what it gives."""
    return unit, flags_of(asked)


@dataclass(slots=True)
class Call:
    """One call of a unit.

    Attributes:
        index: Position among all calls.
        unit: Number of the unit.
        nth: Which call of this unit, from 0.
        reads: What its arguments, and what it read beside them, came from.
        inputs: Shapes and types of the tensors among its arguments.
        structure: How its output is put together.
        specs: Its output tensors.
        flops: Floating-point operations of the forward.
        cost: Equivalent FLOPs of the forward, memory traffic counted in.
        work: Its operations, one by one.
        recomputed: Those that the backward runs again, by activation checkpointing.
        recomputed_bytes: What the largest region keeps from there until its backward is done.
        saved: Numbers of the pieces of memory that autograd keeps for the backward; parameters, buffers and
            the batch apart. `Trace.sizes` has their bytes.
        deferred: Those that a split backward keeps until W.
        deferred_gradients: Bytes of gradients that it keeps beside them.
        activation_bytes: Bytes of what is `saved`. Calls may share memory: `stage_activations` adds up.
        asked: How its arguments are put together, with the constants among them.
        closed: Whether all values that it reads are among its arguments.
        by_values: Whether values of tensors that code between units gives it, such as lengths, may decide
            what it returns: it did not run without them.
        ran: Whether it ran, on made-up values, as it did not run without any.
    """

    index: int
    unit: int
    nth: int
    reads: set[Tag] = field(default_factory=set)
    inputs: Inputs = ()
    structure: Structure = NOTHING
    specs: list[TensorSpec] = field(default_factory=list)
    flops: float = 0.0
    cost: float = 0.0
    work: list[Work] = field(default_factory=list)
    recomputed: list[Work] = field(default_factory=list)
    recomputed_bytes: int = 0
    saved: set[int] = field(default_factory=set)
    deferred: set[int] = field(default_factory=set)
    deferred_gradients: int = 0
    activation_bytes: int = 0
    asked: Structure = NOTHING
    closed: bool = True
    by_values: bool = False
    ran: bool = False

    def resized(self, inputs: Inputs, own: Collection[int] = ()) -> list[TensorSpec] | None:
        """Its output tensors where others come in; None where a size could stand for several.

        Args:
            inputs: Shapes and types of what comes in.
            own: Sizes that the unit has itself, such as the width of a layer.
        """
        if inputs == self.inputs:
            return self.specs
        then, now = ([(len(shape), dtype) for shape, dtype in given] for given in (self.inputs, inputs))
        if then != now:
            return None
        sizes: dict[int, set[int]] = {}
        for (before, _), (after, _) in zip(self.inputs, inputs, strict=True):
            for one, other in zip(before, after, strict=True):
                sizes.setdefault(one, set()).add(other)
        changed = {one: others for one, others in sizes.items() if others != {one}}
        if any(
            len(changed.get(size, ())) > 1
            or (size in changed and (size in own or spec.shape.count(size) > 1))
            for spec in self.specs
            for size in spec.shape
        ):
            return None
        return [
            spec.resized(tuple(next(iter(changed.get(size, {size}))) for size in spec.shape))
            for spec in self.specs
        ]


@dataclass(slots=True)
class Trace:
    """What one run of a step showed.

    Attributes:
        root: The module whose step it is.
        step: Name of the step, such as `training_step`.
        units: The atoms of a cut.
        calls: Their calls in order.
        tail: What the end of the step depends on: loss, logs, metrics, what is returned or kept.
        everywhere: Parameters and buffers whose values steer the code, needed on every stage.
        made_of: For parameters, and buffers of units, that a step makes anew where they are held, by name:
            those that are needed there.
        mutated: Values (call, leaf) that code between the units changes in place.
        together: Groups of units that must share a stage, with the reason.
        effects: What the code between the units leaves behind or puts back: attributes, modes, hooks, states.
        unit_attributes: What the forward of a unit, its number first, changes of its own.
        unit_shapes: Shapes of the tensors in what that is afterwards, by label.
        unit_numbers: What that is afterwards, by label, where it is a number, a flag or a text.
        ended_early: Whether the rest of the step was not seen, for it needs values.
        arguments: Shapes of the micro-batch that was traced.
        written_states: Parameters, buffers and plain tensors that glue changes in place.
        written_in_units: Parameters and buffers that units change in place, without those of batch norms.
        buffers_written: Buffers, of whole numbers too, that units change in place.
        late_states: Buffers and plain tensors outside the units that it writes or sets after the first one.
        state_units: Which unit holds a parameter or buffer; names outside any unit are not in it.
        checkpointed: Whether it uses activation checkpointing around units.
        writes_batch: Whether it changes tensors of the batch in place.
        seeded_at: Where it draws for samples from a generator that it has seeded or made; empty: nowhere.
        refills_batch: Whether it puts entries into a batch that is a dictionary, or takes some out.
        draws_unseen: Whether code between units draws torch's random numbers in a function that is not known
            to, such as one of `torch.jit.script`.
        host_random: Whether a unit draws from numpy's or Python's random state.
        result: What the returned value depends on, a part of `tail`.
        returned: Keys of the dictionary that the step returns.
        returns: Class of what it returns; that of None where its end was not seen.
        sizes: Bytes of each piece of memory that is kept for the backward or handed on, by number.
        between: Operations of the code between units, by the number of the call that comes next.
        handed: Number of the memory behind each value (call, leaf).
        side_writes: Attributes with tensors that the forward of units sets: module number and name.
        ports: What calls (unit, nth) give away beside their output.
        tells_numbers: Whether it logs, or gives metrics, what no unit has computed, or numbers of Python.
        tensors_read: Attributes that hold, when the step begins, tensors that code between units reads.
        transient: Containers that units fill and the end of the step empties.
        losses_inside: Means over classes inside units: the unit's name, and the class that is left out.
        weighted_inside: Those by weights of the classes: the unit's name, and the line.
        steered: Whether code between units reads a random number or a value of the batch, which may choose
            what it calls next.
        reads_values: Whether it reads a number from what units return.
        decisions: What it decides by numbers that change between batches, with what came out.
        numbers: Where those of them stand that are beside the module, by label.
        steered_at: The line where code before a unit first reads a number of units; empty where none does.
        divided_at: Likewise, where micro-batches may choose otherwise than their batch, or another unit.
        reads_gradients: Whether it reads `.grad` of a weight.
        way_out: Patterns for `units` with which nothing is divided, as a trial has shown; empty: none known.
        asked: Whether code asks whether something holds of values that units compute.
        compares: Whether code reads a number of such values that it may compare with others.
        assumed: What it took for granted of values that it did not have.
        counts_apart: Whether code asks of such values for those that differ.
        leaves: Numbers and strings of the micro-batch that was traced.
        is_made_up: Whether nothing was traced, and all that is known are the units; see `untraced`.
        index: The index of the batch that was traced.
        circumstances: What it may depend on beside the batch, as a digest.
        porting: Which ports it looked for; None: none.
        mixed: Lines at which samples of the batch are mixed with each other, by which operation, and how
            many calls of units had been made.
        hooked: Calls of units on whose outputs a hook on gradients was put, and how many calls came before.
        has_means: Whether values of units meet rows in which a mean over samples may be.
        by_sizes: Whether it reads whole numbers of the batch that are no counts, such as its greatest length.
        may_mix_values: Whether an operation that may mix samples meets values of units before another unit.
        blocks: How often all samples stand one after the other among rows that a unit returns, if more than
            once, by unit, number of the call and tensor.
        unordered: Those with another number of rows than samples, of which that is not known.
        is_shared: Whether units and code between them change the same attribute, such as a count of calls.
    """

    root: nn.Module
    step: str
    units: list[Unit]
    calls: list[Call] = field(default_factory=list)
    tail: set[Tag] = field(default_factory=set)
    everywhere: set[str] = field(default_factory=set)
    made_of: dict[str, set[str]] = field(default_factory=dict)
    mutated: set[tuple[int, int]] = field(default_factory=set)
    together: list[tuple[frozenset[int], str]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    unit_attributes: list[tuple[int, Place]] = field(default_factory=list)
    unit_shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    unit_numbers: dict[str, Any] = field(default_factory=dict)
    ended_early: bool = False
    arguments: Hashable = None
    written_states: list[str] = field(default_factory=list)
    written_in_units: set[str] = field(default_factory=set)
    buffers_written: set[str] = field(default_factory=set)
    late_states: list[str] = field(default_factory=list)
    state_units: dict[str, int] = field(default_factory=dict)
    checkpointed: bool = False
    writes_batch: bool = False
    refills_batch: bool = False
    seeded_at: str = ""
    draws_unseen: bool = False
    host_random: bool = False
    result: set[Tag] = field(default_factory=set)
    returned: list[Any] = field(default_factory=list)
    returns: type = NoneType
    sizes: dict[int, int] = field(default_factory=dict)
    between: dict[int, list[Work]] = field(default_factory=lambda: defaultdict(list))
    handed: dict[tuple[int, int], int] = field(default_factory=dict)
    side_writes: set[PortPlace] = field(default_factory=set)
    ports: dict[tuple[int, int], PortSpec] = field(default_factory=dict)
    tells_numbers: bool = False
    tensors_read: list[Place] = field(default_factory=list)
    transient: frozenset[PortPlace] = frozenset()
    losses_inside: set[tuple[str, int]] = field(default_factory=set)
    weighted_inside: dict[str, str] = field(default_factory=dict)
    steered: bool = False
    reads_values: bool = False
    decisions: dict[Expression, Any] = field(default_factory=dict)
    numbers: dict[str, Place] = field(default_factory=dict)
    steered_at: str = ""
    divided_at: str = ""
    reads_gradients: bool = False
    way_out: tuple[str, ...] = ()
    asked: bool = False
    compares: bool = False
    assumed: Assumed = NOTHING_ASSUMED
    counts_apart: bool = False
    leaves: Hashable = None
    is_made_up: bool = False
    index: int | None = None
    circumstances: str = ""
    porting: Porting | None = None
    mixed: dict[str, tuple[str, int]] = field(default_factory=dict)
    hooked: set[tuple[int, int]] = field(default_factory=set)
    has_means: bool = False
    by_sizes: bool = False
    may_mix_values: bool = False
    blocks: dict[tuple[int, int, int], int] = field(default_factory=dict)
    unordered: set[tuple[int, int, int]] = field(default_factory=set)
    is_shared: bool = False

    @property
    def path(self) -> tuple[int, ...]:
        """Numbers of the units in the order of their calls."""
        return tuple(call.unit for call in self.calls)

    @property
    def way(self) -> tuple[Hashable, ...]:
        """The same, with what may choose what they give."""
        return tuple(turn_of(call.unit, call.asked) for call in self.calls)

    @property
    def follows_values(self) -> bool:
        """Whether values of a batch may decide how much units return."""
        return any(call.by_values for call in self.calls)

    @property
    def changes_batch(self) -> bool:
        """Whether the step may change the batch that it is given, which hooks are to find."""
        return self.ended_early or self.writes_batch or self.refills_batch

    def foresee(self, other: "Trace") -> None:
        """Take what a run of the step in another batch, which called the same units, needs of the stages."""
        for call, again in zip(self.calls, other.calls, strict=True):
            call.reads |= {tag for tag in again.reads if tag.kind == "state"}
        self.tail |= {tag for tag in other.tail if tag.kind == "state"}
        self.everywhere |= other.everywhere
        for name, names in other.made_of.items():
            self.made_of.setdefault(name, set()).update(names)
        self.together += [group for group in other.together if group not in self.together]

    def of_batch(self, *batch: Any) -> None:
        """Note of the micro-batch that was traced its form, and numbers and strings in it."""
        self.arguments, self.leaves = signature_of(*batch), plain_leaves(*batch)

    def join(self, other: "Trace") -> None:
        """Take what another run of the step showed, which called the same units: either may come true."""
        for call, again in zip(self.calls, other.calls, strict=True):
            call.reads |= again.reads
        own, more = ({effect.place.identity for effect in one.effects} for one in (self, other))
        for effect in (*self.effects, *other.effects):
            effect.by_value |= effect.place.identity not in own & more
        self.effects += [effect for effect in other.effects if effect.place.identity not in own]
        self.tail |= other.tail
        self.result |= other.result
        self.everywhere |= other.everywhere
        for name, names in other.made_of.items():
            self.made_of.setdefault(name, set()).update(names)
        self.mutated |= other.mutated
        self.written_in_units |= other.written_in_units
        self.buffers_written |= other.buffers_written
        self.written_states = sorted({*self.written_states, *other.written_states})
        self.late_states = sorted({*self.late_states, *other.late_states})
        self.together += [group for group in other.together if group not in self.together]
        self.writes_batch |= other.writes_batch
        self.refills_batch |= other.refills_batch
        self.seeded_at = self.seeded_at or other.seeded_at
        self.draws_unseen |= other.draws_unseen
        self.losses_inside |= other.losses_inside
        self.weighted_inside.update(other.weighted_inside)
        self.decisions.update(other.decisions)
        self.numbers.update(other.numbers)
        self.mixed = {**other.mixed, **self.mixed}
        self.hooked |= other.hooked
        self.has_means |= other.has_means
        self.by_sizes |= other.by_sizes
        self.may_mix_values |= other.may_mix_values
        self.steered_at = self.steered_at or other.steered_at
        self.divided_at = self.divided_at or other.divided_at

    def may_do(self, other: "Trace") -> None:
        """Take from another run what decides whether micro-batches are given their samples of the batch's."""
        self.mixed = {**other.mixed, **self.mixed}
        self.has_means |= other.has_means
        self.by_sizes |= other.by_sizes
        self.may_mix_values |= other.may_mix_values
        self.reads_values |= other.reads_values
        self.draws_unseen |= other.draws_unseen
        self.checkpointed |= other.checkpointed

    def carried(self, *, filled: bool = False) -> set[tuple[int, Any]]:
        """Places that ports of units fill or set on every stage.

        Args:
            filled: Whether only those that they fill.
        """
        ways = [way for spec in self.ports.values() for way in spec.ways if way.filled or not filled]
        modules = list(self.root.modules()) if ways else []
        return {(id(vars(modules[number])), name) for (number, name), _ in ways}

    def leaking_units(self) -> frozenset[int]:
        """Units that change something beside their output which is read elsewhere."""
        read = {(call.index, tag.call) for call in self.calls for tag in call.reads if tag.kind == "effect"}
        leaks = {source for reader, source in read if reader != source}
        leaks |= {tag.call for tag in self.tail if tag.kind == "effect"}
        return frozenset(self.calls[index].unit for index in leaks)


ContextFactory = Callable[[], AbstractContextManager[Any]]


class Look(NamedTuple):
    """What a trace is to know beside the module.

    Attributes:
        sinks: Methods of the module that take values away, such as `log`.
        others: What the step may change beside the module.
        seen: Calls of earlier traces, for a unit that can be traced on the whole module only.
        device: Where the step runs.
        seeds: The random numbers of a micro-batch, where the trace is to draw those; `seen` then stands for
            calls that are the same.
        assumed: What it takes for granted of values that are not known.
        opposite: The units that are called with such answers, in order, where they are to be the others; the
            run ends where it calls another one.
        costs: Whether to note what operations cost, and what autograd keeps of units.
        answers: Of `Guesses`, where they are not the usual ones.
    """

    sinks: Sequence[str]
    others: Sequence[Owner]
    seen: Sequence[Call]
    device: torch.device
    seeds: MicrobatchSeeds | None = None
    assumed: Assumed = NOTHING_ASSUMED
    opposite: tuple[int, ...] | None = None
    costs: bool = True
    answers: Mapping[str, Any] = MappingProxyType({})


class Observation:
    """What is known while a step is traced; all that look on share it.

    Args:
        root: The LightningModule.
        step: Name of its method.
        patches: The patched units.
        mode: The placeholders' mode.
        look: What else is looked at.
        stand_ins: For weights that have no values; None where all have.

    Attributes:
        trace: What was seen.
        tags: What each tensor comes from.
        handed: Of that only the units' own outputs, not what glue makes of them.
        shared: Who shares memory with an output of a unit.
        batch: The memory of the batch.
        inside: The call of a unit that runs.
        runs_really: Whether that unit runs on made-up input.
        costs, answers: See `Look`.
        ended_early: Whether what the rest of the step writes was not seen.
        made: Tensors that the trace has made.
        values: The outputs of units, by their tags.
        states: Names of parameters, buffers and plain tensors, by their memory.
        mirrors: Views of real tensors, by their memory; the view is held, so that no key is used again.
        poisoned: Real tensors that a placeholder was written into, by their memory.
        watch: Of a call with ports.
        expected: The units that it may call, in order; None: any.
        glue_modules: Those outside the units.
        values_read: Told when a value of a unit is read as a number.
        tensors_used: Told what functions are called with.
        tensor_written: Told of tensors that are written in place and are no state of a module.
    """

    def __init__(
        self, root: nn.Module, step: str, patches: UnitPatches, mode: PlaceholderMode, look: Look,
        stand_ins: StandIns | None = None,
    ) -> None:  # fmt: skip
        self.root, self.patches, self.mode = root, patches, mode
        self.stand_ins, self.device = stand_ins, look.device
        self.trace, self.seen, self.seeds = Trace(root, step, patches.units), look.seen, look.seeds
        self.trace.assumed, self.expected = look.assumed, look.opposite
        self.tags, self.handed, self.batch = TagStore(), TagStore(), TagStore()
        self.shared = SharedMemory(self.tags, self.origin)
        self.inside: Call | None = None
        self.runs_really = self.ended_early = False
        self.costs, self.answers = look.costs, look.answers
        self.made: list[weakref.ref[Tensor]] = []
        self.values: dict[Tag, weakref.ref[Tensor]] = {}
        self.states: dict[int, str] = {}
        self.mirrors: dict[int, tuple[Tensor, Tensor]] = {}
        self.poisoned: dict[int, Tensor] = {}
        self.watch: Watch | None = None
        self.glue_modules = self._find_glue_modules()
        self.values_read: Callable[[], None] = lambda: None
        self.tensors_used: Callable[[Iterable[Tensor]], None] = lambda tensors: None
        self.tensor_written: Callable[..., bool] = lambda tensor, computed: False

    def _find_glue_modules(self) -> list[nn.Module]:
        apart = [*(unit.module for unit in self.patches.units), *metrics_of(self.root)]
        inner = {id(module) for one in apart for module in one.modules()}
        return [module for module in self.root.modules() if id(module) not in inner]

    @property
    def weightless(self) -> bool:
        """Whether values of parameters or buffers are missing while the step is traced."""
        return self.stand_ins is not None

    def in_glue(self, value: Any) -> bool:
        """Whether a module outside the units has this very object."""
        return any(value is own for module in self.glue_modules for own in vars(module).values())

    def note_made(self, results: Iterable[Tensor]) -> None:
        """Made for a unit that runs on made-up input, or by it: what stays of these is an effect."""
        assert self.inside is not None, "a unit runs"
        for tensor in results:
            if not self.tags.of(tensor):
                self.tags.add(tensor, frozenset({Tag("effect", self.inside.index)}))

    def origin(self, tensor: Tensor) -> Tensor:
        """The real tensor that a placeholder is a view of, or the tensor itself."""
        return self.mirrors.get(storage_key(tensor), (tensor, tensor))[1]

    def is_state(self, tensor: Tensor) -> bool:
        """Whether this is a parameter or buffer of the module, or a view of one."""
        key = storage_key(tensor)
        return key in self.states or (
            key in self.mirrors and storage_key(self.mirrors[key][1]) in self.states
        )

    def tail_read(self, value: Any) -> None:
        """Something that leaves the step (a loss, a logged value) depends on this."""
        self.trace.tail |= self.tags.union(tensors_in(value))
        self.trace.tail |= {
            tag for tensor in tensors_in(value) if self.is_poisoned(tensor) for tag in self.tags.of(tensor)
        }

    def told(self, call: Any) -> None:
        """The step logs, or gives a metric, what it calls these methods with."""
        note_told(call)
        self.tail_read(call)
        self.trace.tells_numbers |= any(map(self._is_plain, tree_leaves(call)))

    def _is_plain(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return isinstance(value, float)
        return not is_placeholder(value) and not any(tag.kind == "value" for tag in self.tags.of(value))

    def note_batch(self, written: Tensor) -> None:
        """Note a write into the memory of the batch."""
        if self.batch.of(written):
            self.trace.writes_batch = True

    def written_inside(self, call: Call, tensors: Iterable[Tensor]) -> None:
        """A unit has written into what is not its own."""
        own = frozenset({Tag("effect", call.index)})
        for tensor in tensors:
            self.tags.add(tensor, own)
            self.tags.add(self.origin(tensor), own)
            self.shared.written(self.origin(tensor), lambda: user_line(self.root))

    def check_changed(self) -> None:
        """Refuse a step that reads what it has changed through another output of the same unit."""
        read = next(
            filter(is_changed, self.trace.tail.union(*(call.reads for call in self.trace.calls))), None
        )
        if read is None:
            return
        unit = self.patches.units[self.trace.calls[read.call].unit].name
        raise SplitError(
            f"the memory of an output of unit {unit!r}, which it shares with another of its outputs or with "
            "its input, is changed in place and read afterwards through the other one: return "
            f"a copy [at {read.name}]"
        )

    def is_poisoned(self, tensor: Tensor) -> bool:
        """Whether a placeholder was written into this real tensor."""
        return storage_key(tensor) in self.poisoned


def step_function(root: nn.Module, step: str) -> Callable[..., Any]:
    """The user's method, or our error where there is none."""
    function = getattr(root, step, None)
    if not callable(function):
        raise SplitError(f"{type(root).__name__} has no {step}")
    result: Callable[..., Any] = function
    return result


def refuse(reason: str, root: nn.Module) -> SplitError:
    """The error for something that the split cannot carry, with the user's line."""
    return SplitError(f"{reason} [at {user_line(root)}]")


def in_function_transform() -> bool:
    """Whether we are inside `torch.func.vmap`, `grad` and the like."""
    return in_a_transform()


def untraced(root: nn.Module, step: str, units: Sequence[Unit]) -> Trace:
    """A trace to choose a cut from, for a step that every rank runs whole.

    Its units cost as much as they have parameters, and are called in the order of the module tree. What is in
    none of them is needed on every stage.

    Args:
        root: The LightningModule.
        step: Its name.
        units: From `find_units`.
    """
    trace = Trace(root, step, list(units), is_made_up=True)
    for number, unit in enumerate(units):
        trace.calls.append(Call(number, number, 0, cost=float(unit.num_parameters)))
    holders = {id(module): number for number, unit in enumerate(units) for module in unit.module.modules()}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers):
            full = f"{prefix}.{name}" if prefix else name
            if id(module) in holders:
                trace.state_units[full] = holders[id(module)]
            else:
                trace.everywhere.add(full)
    return trace


def note_told(call: Any) -> None:
    """A number that is logged, or given to a metric, decides nothing.

    Args:
        call: With what, in tuples and dictionaries.
    """
    for one in call.values() if isinstance(call, dict) else call:
        if isinstance(one, Noted):
            one.is_used = True
        elif isinstance(one, dict | tuple):
            note_told(one)
