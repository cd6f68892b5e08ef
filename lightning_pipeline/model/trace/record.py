"""Run one micro-batch through the user's step without computing the units, and note what depends on what."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lightning_pipeline._torch import in_a_transform
from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import (
    NOTHING,
    Generators,
    ModuleState,
    PlaceholderMode,
    StandIns,
    Structure,
    Tag,
    TensorSpec,
    forget_placeholders,
    map_tensors,
    random_state_kept,
    user_line,
)
from lightning_pipeline.model.trace.choices import NotedIndex, plain_leaves, with_noted_index
from lightning_pipeline.model.trace.costs import Work
from lightning_pipeline.model.trace.effects import Effect
from lightning_pipeline.model.trace.patches import UnitPatches
from lightning_pipeline.model.trace.places import Owner, Place, Standing
from lightning_pipeline.model.trace.ports import Porting, PortPlace, PortSpec
from lightning_pipeline.model.trace.units import Unit


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
    """

    index: int
    unit: int
    nth: int
    reads: set[Tag] = field(default_factory=set)
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
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
        mutated: Values (call, leaf) that code between the units changes in place.
        together: Groups of units that must share a stage, with the reason.
        effects: What the code between the units leaves behind or puts back: attributes, modes, hooks, states.
        unit_attributes: What the forward of a unit, its number first, changes of its own.
        ended_early: Whether the rest of the step was not seen, for it needs values.
        arguments: Shapes of the micro-batch that was traced.
        written_states: Parameters, buffers and plain tensors that glue changes in place.
        late_states: Buffers and plain tensors outside the units that it writes or sets after the first one.
        state_units: Which unit holds a parameter or buffer; names outside any unit are not in it.
        checkpointed: Whether it uses activation checkpointing around units.
        writes_batch: Whether it changes tensors of the batch in place.
        draws_unseen: Whether code between units draws torch's random numbers in a function that is not known
            to, such as one of `torch.jit.script`.
        host_random: Whether a unit draws from numpy's or Python's random state.
        result: What the returned value depends on, a part of `tail`.
        returned: Keys of the dictionary that the step returns.
        sizes: Bytes of each piece of memory that is kept for the backward or handed on, by number.
        between: Operations of the code between units, by the number of the call that comes next.
        handed: Number of the memory behind each value (call, leaf).
        side_writes: Attributes with tensors that the forward of units sets: module number and name.
        ports: What calls (unit, nth) give away beside their output.
        transient: Containers that units fill and the end of the step empties.
        losses_inside: Means over classes inside units: the unit's name, and the class that is left out.
        weighted_inside: Those by weights of the classes: the unit's name, and the line.
        steered: Whether code between units reads a random number or a value of the batch, which may choose
            what it calls next.
        steered_by_index: Whether it compares the index of the batch, or computes with it.
        leaves: Numbers and strings of the micro-batch that was traced.
        is_made_up: Whether nothing was traced, and all that is known are the units; see `untraced`.
    """

    root: nn.Module
    step: str
    units: list[Unit]
    calls: list[Call] = field(default_factory=list)
    tail: set[Tag] = field(default_factory=set)
    everywhere: set[str] = field(default_factory=set)
    mutated: set[tuple[int, int]] = field(default_factory=set)
    together: list[tuple[frozenset[int], str]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    unit_attributes: list[tuple[int, Place]] = field(default_factory=list)
    ended_early: bool = False
    arguments: Hashable = None
    written_states: list[str] = field(default_factory=list)
    late_states: list[str] = field(default_factory=list)
    state_units: dict[str, int] = field(default_factory=dict)
    checkpointed: bool = False
    writes_batch: bool = False
    draws_unseen: bool = False
    host_random: bool = False
    result: set[Tag] = field(default_factory=set)
    returned: list[Any] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    between: dict[int, list[Work]] = field(default_factory=lambda: defaultdict(list))
    handed: dict[tuple[int, int], int] = field(default_factory=dict)
    side_writes: set[PortPlace] = field(default_factory=set)
    ports: dict[tuple[int, int], PortSpec] = field(default_factory=dict)
    transient: frozenset[PortPlace] = frozenset()
    losses_inside: set[tuple[str, int]] = field(default_factory=set)
    weighted_inside: dict[str, str] = field(default_factory=dict)
    steered: bool = False
    steered_by_index: bool = False
    leaves: Hashable = None
    is_made_up: bool = False

    @property
    def path(self) -> tuple[int, ...]:
        """Numbers of the units in the order of their calls."""
        return tuple(call.unit for call in self.calls)

    def carried(self) -> set[tuple[int, Any]]:
        """Places that ports of units fill or set on every stage."""
        modules = list(self.root.modules())
        ways = [way for spec in self.ports.values() for way in spec.ways]
        return {(id(vars(modules[number])), name) for (number, name), _ in ways}

    def leaking_units(self) -> frozenset[int]:
        """Units that change something beside their output which is read elsewhere."""
        read = {(call.index, tag.call) for call in self.calls for tag in call.reads if tag.kind == "effect"}
        leaks = {source for reader, source in read if reader != source}
        leaks |= {tag.call for tag in self.tail if tag.kind == "effect"}
        return frozenset(self.calls[index].unit for index in leaks)


ContextFactory = Callable[[], AbstractContextManager[Any]]


class Seeding(Protocol):
    """The random numbers of one micro-batch. See `replay.seeds`."""

    def enter(self, unit: int) -> Any:
        """A unit is called."""
        ...

    def leave(self, entered: Any, given: Any, *, again: bool) -> Any:
        """The call is over."""
        ...

    def drawing(self, generator: Any = None) -> Any:
        """A random call between units comes."""
        ...

    def drawn(self, before: Any) -> None:
        """It is done."""
        ...


class Look(NamedTuple):
    """What a trace is to know beside the module.

    Attributes:
        sinks: Methods of the module that take values away, such as `log`.
        others: What the step may change beside the module.
        seen: Calls of earlier traces, for a unit that can be traced on the whole module only.
        device: Where the step runs.
        seeds: The random numbers of a micro-batch, where the trace is to draw those; `seen` then stands for
            calls that are the same.
    """

    sinks: Sequence[str]
    others: Sequence[Owner]
    seen: Sequence[Call]
    device: torch.device
    seeds: Seeding | None = None


def trace_step(
    root: nn.Module,
    step: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    units: Sequence[Unit],
    patches: UnitPatches | None = None,
    mode: PlaceholderMode | None = None,
    sinks: Sequence[str] = ("log", "log_dict"),
    forward_context: ContextFactory = nullcontext,
    others: Sequence[Owner] = (),
    seen: Sequence[Call] = (),
    device: torch.device | None = None,
    seeds: Seeding | None = None,
) -> Trace:
    """Call a step once with one micro-batch, every unit in fake-tensor mode, everything else for real.

    Nothing is left behind: the batch is cloned, and buffers, attributes, random states and caches are
    restored.

    Args:
        root: The LightningModule, with its weights or on the meta device.
        step: Name of its method.
        args: Its arguments: the micro-batch, its index, and so on.
        kwargs: Its keyword arguments.
        units: The units, from `find_units`.
        patches: The patched units where the module is split already; None patches them for this call.
        mode: The placeholders' mode of that split.
        sinks: Methods of `root` that take values away, such as `log`.
        forward_context: Makes the precision's context, such as autocast.
        others: What the step may change beside the module.
        seen: Calls of earlier traces, for a unit that can be traced on the whole module only.
        device: Where the step runs; weights that are elsewhere are seen there. None stands for the CPU.
        seeds: The random numbers of the micro-batch, where its way through the model is looked for; calls
            like one of `seen` then are not traced again.

    Raises:
        SplitError: The step does something that no cut allows. The message names module and line.
    """
    patched = patches or UnitPatches(units)
    placeholders = mode or PlaceholderMode()
    batch = tuple(args), dict(kwargs or {})
    look = Look(sinks, others, seen, device or torch.device("cpu"), seeds)

    def once(porting: Porting | None = None) -> Trace:
        if patches is None:
            patched.install()
        try:
            return _traced(root, step, batch, patched, placeholders, look, forward_context, porting)
        finally:
            if patches is None:
                patched.remove()

    return _with_ports(once(), once)


def _traced(
    root: nn.Module, step: str, batch: Any, patches: UnitPatches, mode: PlaceholderMode,
    look: Look, forward_context: ContextFactory, porting: Porting | None,
) -> Trace:  # fmt: skip
    from lightning_pipeline.model.trace.tracer import Tracer

    clone = map_tensors(lambda tensor: tensor.detach().clone(), batch)
    clone = with_noted_index(clone[0], index := NotedIndex.of(batch[0])), clone[1]
    saved, outside = ModuleState(root), Standing(look.others)
    grad_mode = torch.is_grad_enabled()
    tracer = None
    try:
        stand_ins = StandIns(mode, look.device)
        weightless = stand_ins.put_into(root)
        tracer = Tracer(root, step, patches, mode, look, stand_ins if weightless else None, porting)
        # Code that torch.compile meets under a dispatch mode it would leave uncompiled for good.
        with random_state_kept(Generators(root.modules())), torch.compiler.set_stance("force_eager"):
            trace = tracer.run(clone[0], clone[1], forward_context)
    finally:
        if tracer is not None:
            tracer.close()
        torch.set_grad_enabled(grad_mode)
        kept = tracer.effects.iterators_taken() if tracer is not None else []
        saved.restore()
        outside.restore()
        for place, replayed in kept:
            place.put(replayed)
    trace.arguments, trace.leaves = signature_of(*batch), plain_leaves(*batch)
    trace.steered_by_index = index is not None and bool(index.noted)
    made = tracer.made
    del tracer, clone
    forget_placeholders(made)
    return trace


def _with_ports(trace: Trace, again: Callable[[Porting], Trace]) -> Trace:
    """Trace once more, with ports, where units change something beside their output that is read.

    Hooks inside units are left where they are unless attributes and containers do not explain it all.
    """
    leaking = trace.leaking_units()
    best = trace
    for hooks in (False, True):
        if not best.leaking_units():
            break
        try:
            other = again(Porting(leaking, frozenset(trace.side_writes), hooks))
        except SplitError:
            continue  # what is refused with ports works without, on one stage
        if len(other.leaking_units()) < len(best.leaking_units()):
            best = other
    return best


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
