"""What one stage sees of a step: its own calls, what arrives and what leaves, and what it remembers."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from lightning_pipeline.model.cut import Microbatch, Route, StepRoutes, TracedOutput, ValueKey
from lightning_pipeline.model.loss import Follower
from lightning_pipeline.model.mixing import Functions
from lightning_pipeline.model.places import BatchChanges
from lightning_pipeline.model.random import States, StepSeeds
from lightning_pipeline.model.tensors import (
    Given,
    PlaceholderCache,
    PlaceholderMode,
    SavedCount,
    Structure,
    TensorSpec,
    is_placeholder,
    map_tensors,
)
from lightning_pipeline.model.trace import PortSpec, Runner, Trace, UnitPatches, Watch

CallKey = tuple[int, int]
Entry = tuple[int, int, Structure, tuple[TensorSpec, ...], States]
Table = tuple[Entry, ...]
Returned = dict[CallKey, tuple[Structure, tuple[TensorSpec, ...], States]]
"""What units of earlier stages returned for a micro-batch, by unit and number of the call."""


class Gathers(Protocol):
    """Keeps what units give to micro-batches, until the batch ends."""

    keys: Collection[ValueKey]

    def take(
        self, microbatch: int, given: Mapping[ValueKey, Tensor], described: Mapping[CallKey, Structure]
    ) -> None: ...


class WholeBatch(NamedTuple):
    """A batch as one.

    Attributes:
        arguments: Of the step.
        fractions: Each micro-batch's share of samples.
        scale: Of all gradients.
        is_weighed: Whether the user has said what the loss of a micro-batch counts for.
    """

    arguments: Microbatch
    fractions: Sequence[float]
    scale: float
    is_weighed: bool = False


@dataclass(slots=True)
class Step:
    """One batch on its way through the stages of this rank.

    Attributes:
        name: The user's method.
        function: That method, bound.
        microbatches: Arguments and keyword arguments of each micro-batch.
        weights: What each loss is multiplied with for the backward; None: no backward follows.
        ways: The ways of this kind of step through the model.
        seeds: The random state of the batch.
        context: Makes the precision's context for one forward.
        split_backward: Whether the plan has I and W actions.
        routes: By micro-batch, its way.
        called: By micro-batch what tells the functions that it calls between units; 0: nobody knows.
        later_outputs: By micro-batch, what units of later stages return, as traced.
        on_microbatch: Told the micro-batch that the last stage is about to run.
        results: What the step returned on the last stage, detached, by micro-batch.
        losses: The undivided loss of each micro-batch, detached; None where the step returned None.
        parts: By micro-batch, what its loss is of the batch's, where that is not its mean by samples.
        follower: Finds that, on the last stage; None where the loss is computed over all micro-batches.
        scale: Of all gradients, where the weights are not used.
        scaled: Makes what a backward begins with larger, as a gradient scaler does.
        count: Counts what the stages hold, in the steps that are looked at.
        mixing: By micro-batch, what gives it its samples of what the step mixes; empty where it does not.
        telling: Around each run: what it prints.
        left_by_batch: By label what the batch as one leaves behind, where micro-batches are given their part
            of what it mixes; None elsewhere.
        gathered: On the last stage what units give, where the batch is looked at as one.
        rehearsed: How what units give is put together where the step ran without them, on the last stage.
        sizes: Samples of each micro-batch.
        batch_changes: What the step has changed of its batch, by micro-batch, on the last stage.
        is_unlike: Whether a unit has given other numbers or texts, or tensors where it gave none.
        around_backward: Each backward of a stage.
        gradient_read: Told that code between units reads `.grad` of a weight.
        returned: Told what the step returns for a micro-batch, on the last stage, where numbers are followed.
        returned_of_whole: Told what it returns where it runs without units for the whole batch, and whether
            no value of units was made up.
    """

    name: str
    function: Callable[..., Any]
    microbatches: Sequence[Microbatch]
    weights: Sequence[float] | None
    ways: StepRoutes
    seeds: StepSeeds
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    on_microbatch: Callable[[int], None] = lambda microbatch: None
    split_backward: bool = False
    routes: Sequence[Route] = ()
    called: Sequence[int] = ()
    later_outputs: Sequence[dict[tuple[int, int], TracedOutput]] = ()
    results: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor | None] = field(default_factory=dict)
    parts: dict[int, Tensor] = field(default_factory=dict)
    follower: Follower | None = None
    scale: float = 1.0
    scaled: Callable[[Tensor], Tensor] = lambda seed: seed
    count: SavedCount | None = None
    mixing: Sequence[Callable[[], Functions]] = ()
    telling: Callable[[], AbstractContextManager[None]] = nullcontext
    left_by_batch: Mapping[str, Any] | None = None
    gathered: Gathers | None = None
    rehearsed: dict[CallKey, Structure] = field(default_factory=dict)
    sizes: Sequence[int] = ()
    batch_changes: dict[int, BatchChanges] = field(default_factory=dict)
    is_unlike: bool = False
    returned: Callable[[int, Any], None] = lambda microbatch, result: None
    returned_of_whole: Callable[[Any, bool], None] = lambda result, is_sure: None
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    gradient_read: Callable[[], None] = lambda: None

    @property
    def trace(self) -> Trace:
        """What the first run of this kind of step showed."""
        return self.ways.base.trace


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the last stage has after a batch; empty lists elsewhere.

    Attributes:
        losses: The undivided loss of each micro-batch, detached; None where the step returned None.
        outputs: What the step returned for each micro-batch, detached.
        parts: What each loss is of the batch's, where that is not its mean by samples.
        worth: What each loss was multiplied with, where that had to be tried.
        say_doubt: Warns of numbers that were not followed, unless the batch was looked at as one.
        factors: What the loss and gradients are still to be multiplied with, see `Follower.found`.
        batch_changes: What the step has changed of each micro-batch.
    """

    losses: list[Tensor | None]
    outputs: list[Any]
    parts: list[Tensor | None]
    worth: list[float] | None = None
    say_doubt: Callable[..., None] = lambda **_: None
    factors: tuple[float, float] | None = None
    batch_changes: list[BatchChanges] = field(default_factory=list)


class StageView:
    """Answers what a replay asks of its stage.

    Args:
        index: The stage.
        root: The LightningModule.
        stage_of: The stage of each unit.
        patches: The patched units.
        mode: The placeholders' mode.
        is_last: Whether this is the last stage.

    Attributes:
        originals: The `forward` of each unit.
        idle: Who answers calls outside steps.
        lost_states: Whether units left generators that the user seeded where is not known.
        hooks_tried: Of hooks on gradients that were looked at: the line, or the module and the code.
        ways_tried: Steps and ways through the model in which backwards were looked at.
        step: Name of the user's method.
        route: The way of the micro-batch that runs.
        incoming: Values that the stage before sends, in order.
        outgoing: Values that the next stage is sent.
        own_calls: Of units of this stage.
        mutated: Values that code between units changes in place.
        has_later_calls: Whether units of later stages are called.
        no_unit_follows: Whether no call of theirs ends the step here.
        goes_on: Whether the stage goes on to the end of the step, for what is left behind there.
        read_before: Values of earlier stages that units of earlier stages read, as this one may.
        repeated: Units that are called several times, or may be.
        host_random: Whether a unit draws from numpy's or Python's random state.
        checkpointed: Whether there is activation checkpointing around units.
        rewritten: Parameters, buffers and plain tensors of this stage that the step changes in place.
        num_tensors: In what each call gives.
        ports: What calls give away beside their output.
        assumed: What the trace took for granted of values that it did not have.
    """

    incoming: Sequence[ValueKey]
    outgoing: Sequence[ValueKey]

    def __init__(
        self, index: int, root: nn.Module, stage_of: Sequence[int], patches: UnitPatches,
        mode: PlaceholderMode, *, is_last: bool,
    ) -> None:  # fmt: skip
        self.index, self.root, self.is_last = index, root, is_last
        self.modules = list(root.modules())
        self.stage_of, self.mode = list(stage_of), mode
        self.originals = patches.originals
        self.idle: Runner | None = patches.idle
        self.lost_states = False
        self.hooks_tried = set[str]()
        self.ways_tried = set[tuple[str, tuple[int, ...]]]()
        self.remembered = PlaceholderCache()
        self._patches = patches
        self._placeholders: dict[tuple[ValueKey, TensorSpec], Tensor] = {}
        self._returned: dict[ValueKey, TensorSpec] = {}
        self._read: tuple[Table, Returned] = ((), {})
        self._written: tuple[Table, tuple[Entry, ...], Table] = ((), (), ())
        self._read_on: tuple[Route | None, set[ValueKey]] = (None, set())
        self._step: Step | None = None
        self.route: Route | None = None
        self.num_tensors: dict[CallKey, int] = {}

    # ---- a batch

    def begin(self, step: Step) -> None:
        """A batch begins."""
        self._step = step
        self.step = step.name
        self.idle = self._patches.idle
        trace, every = step.trace, step.ways.varies or step.trace.draws_unseen
        self.repeated = set(range(len(self.stage_of))) if every else {c.unit for c in trace.calls if c.nth}
        self.host_random = trace.host_random
        self.take(step.ways.base)

    def take(self, route: Route) -> None:
        """A micro-batch comes that goes this way."""
        if route is self.route:
            return
        self.route, live = route, route.liveness
        self.incoming = live.messages[self.index] if self.index else []
        self.outgoing = live.messages[self.index + 1] if self.index + 1 < len(live.messages) else []
        self.own_calls, self.mutated = live.own_calls[self.index], live.mutated
        self.has_later_calls = live.has_later_calls[self.index]
        self.goes_on = route.goes_on[self.index]
        self.read_before = self._read_before(route)
        self.checkpointed = route.trace.checkpointed
        self.rewritten = self._rewritten(route.trace)
        self.num_tensors = {(call.unit, call.nth): len(call.specs) for call in route.trace.calls}
        self.ports, self.assumed = route.trace.ports, route.trace.assumed
        self.no_unit_follows = not (self.is_last or live.leaves[self.index])

    def _rewritten(self, trace: Trace) -> list[Tensor]:
        known = (trace, self.current_step().trace)
        names = {name for one in known for name in (*one.written_states, *one.written_in_units)}
        held = (getattr(self.root.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names)
        return [one for one in held if isinstance(one, Tensor) and not is_placeholder(one)]

    def _read_before(self, route: Route) -> set[ValueKey]:
        """Found once while the way is the same: what more is learned of one makes another."""
        if self._read_on[0] is not route:
            calls, stage_of = route.trace.calls, self.stage_of
            tags = {t for c in calls if stage_of[c.unit] < self.index for t in c.reads if t.kind == "value"}
            found = {(calls[tag.call].unit, calls[tag.call].nth, tag.leaf) for tag in tags}
            self._read_on = route, found
        return self._read_on[1]

    def end(self) -> None:
        """It is over."""
        self._step = self.route = None

    def current_step(self) -> Step:
        """The batch that runs."""
        assert self._step is not None, "begin() comes before the first action"
        return self._step

    def fresh(self, value: Any) -> Any:
        """Arguments of the step in containers of our own, and tensors where the step writes into them.

        Micro-batches are views of one batch: a write into one would count as a write into all.
        """
        copied = self.current_step().trace.writes_batch
        return map_tensors(lambda tensor: tensor.clone() if copied else tensor, value)

    # ---- what a replay asks

    def module_of(self, unit: int) -> nn.Module:
        """The module of a unit."""
        return self._patches.units[unit].module

    def unit_name(self, unit: int) -> str:
        """Name of a unit."""
        return self._patches.units[unit].name

    def watch(self, unit: int, ports: PortSpec, given: Given) -> Watch:
        """Of a call of a unit that gives something away beside its output."""
        return Watch(self.modules, self._patches.units[unit].module, ports, given)

    def placeholder(self, key: ValueKey, spec: TensorSpec) -> Tensor:
        """The placeholder for a value, made once; one that glue changes in place is made anew."""
        if key in self.mutated:
            return self.mode.make(spec)
        found = self._placeholders.get((key, spec))
        if found is None:
            if len(self._placeholders) > 4096:
                self._placeholders.clear()
            found = self._placeholders[key, spec] = self.mode.make(spec)
            self.remembered.keep(found)
        return found

    def spec_of(self, key: ValueKey, tensor: Tensor) -> TensorSpec:
        """What a unit returned: the same object as for the micro-batch before where nothing has changed."""
        known = self._returned.get(key)
        if (
            known is None
            or known.shape != tensor.shape
            or known.stride != tensor.stride()
            or known.dtype is not tensor.dtype
            or known.requires_grad is not tensor.requires_grad
        ):
            known = self._returned[key] = TensorSpec.of(tensor)
        return known

    def traced_output(self, unit: int, nth: int, microbatch: int) -> TracedOutput | None:
        """What a unit of a later stage returned when a micro-batch of these shapes was traced."""
        return self.current_step().later_outputs[microbatch].get((unit, nth))

    def read_table(self, table: Hashable) -> Returned:
        """What earlier units returned for this micro-batch, by call."""
        if self._read[0] is not table:
            entries: Any = table
            self._read = entries, {(unit, nth): what for unit, nth, *what in entries}
        return self._read[1]

    def write_table(self, entries: list[Entry]) -> Table:
        """The table for the next stage: what was read and the own outputs. The same object if equal."""
        own = tuple(entries)
        if self._written[0] is not self._read[0] or self._written[1] != own:
            self._written = (self._read[0], own, (*self._read[0], *own))
        return self._written[2]
