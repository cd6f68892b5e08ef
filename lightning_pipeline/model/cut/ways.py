"""The ways of a step through the model: which units a micro-batch calls, in order.

Of each way, which values each boundary message carries, and which stages need which parameter.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.places import (
    AT,
    INDEX,
    MISSING,
    Decisions,
    Expression,
    Owner,
    Place,
    leaves_of,
    outcome,
)
from lightning_pipeline.model.tensors import Structure, TensorSpec, standing_tensors, storage_key
from lightning_pipeline.model.trace import Call, PortSpec, Trace, inputs_of, plain_leaves, plain_state
from lightning_pipeline.registry import named_parameters_of

ValueKey = tuple[int, int, int]  # unit, which call of it, which output tensor
_MOST_KEYS, _MOST_DECISIONS, _MOST_HIDDEN = 20, 200, 32
_BY_INDEX: Expression = (AT, INDEX)
Microbatch = tuple[tuple[Any, ...], dict[str, Any]]
_MOST_OTHERWISE = 40  # looks at what a step does if values of units decide otherwise
_FORMS = 6  # of micro-batches that go one way, after which no other form is taken to go another
TracedOutput = tuple[Structure, list[TensorSpec]]


@dataclass(slots=True)
class Liveness:
    """What crosses each cut in one kind of step.

    Attributes:
        messages: For each stage but the first, the values that it is sent, in the order of their calls.
        own_calls: For each stage, the calls (unit, nth) of its units.
        mutated: Values that code between the units changes in place.
        has_later_calls: By stage, whether units of later stages are called at all.
        leaves: By stage, whether one is called after the stage's own last call.
        meets_later_calls: By stage, whether one is called before the stage's own last call, as in two passes
            through the same layers.
    """

    messages: list[list[ValueKey]]
    own_calls: list[frozenset[tuple[int, int]]]
    mutated: frozenset[ValueKey]
    has_later_calls: list[bool] = field(default_factory=list)
    leaves: list[bool] = field(default_factory=list)
    meets_later_calls: list[bool] = field(default_factory=list)


def liveness_of(trace: Trace, stage_of: Sequence[int], num_stages: int) -> Liveness:
    """Work out the messages of a partition.

    A value made on stage p and last read on stage r is part of every message from p to r: neighbours pass
    it along. What the end of the step reads counts as read by the last stage.

    Args:
        trace: What a run of the step showed.
        stage_of: The stage of each unit.
        num_stages: Number of stages.
    """
    last_reader: dict[tuple[int, int], int] = {}
    for call in trace.calls:
        for tag in call.reads:
            if tag.kind == "value":
                key = (tag.call, tag.leaf)
                last_reader[key] = max(last_reader.get(key, 0), stage_of[call.unit])
    last_reader.update({(tag.call, tag.leaf): num_stages - 1 for tag in trace.tail if tag.kind == "value"})
    messages: list[list[ValueKey]] = [[] for _ in range(num_stages)]
    for (index, leaf), reader in sorted(last_reader.items()):
        call = trace.calls[index]
        for stage in range(stage_of[call.unit] + 1, reader + 1):
            messages[stage].append((call.unit, call.nth, leaf))
    own = [
        frozenset((call.unit, call.nth) for call in trace.calls if stage_of[call.unit] == stage)
        for stage in range(num_stages)
    ]
    mutated = frozenset((trace.calls[i].unit, trace.calls[i].nth, leaf) for i, leaf in trace.mutated)
    later = [any(own[s] for s in range(stage + 1, num_stages)) for stage in range(num_stages)]
    stages = [stage_of[call.unit] for call in trace.calls]
    last = [max((i for i, found in enumerate(stages) if found == s), default=-1) for s in range(num_stages)]
    leaves = [any(found > stage for found in stages[at + 1 :]) for stage, at in enumerate(last)]
    meets = [any(found > stage for found in stages[: max(at, 0)]) for stage, at in enumerate(last)]
    return Liveness(messages, own, mutated, later, leaves, meets)


def backward_edges(trace: Trace, stage_of: Sequence[int]) -> list[tuple[str, str]]:
    """Pairs of units (from, to) whose value would have to travel to an earlier stage."""
    found = []
    for call in trace.calls:
        for tag in call.reads:
            if tag.kind == "value":
                source = trace.calls[tag.call].unit
                if stage_of[source] > stage_of[call.unit]:
                    found.append((trace.units[source].name, trace.units[call.unit].name))
    return found


def stages_of_states(
    root: nn.Module, trace: Trace, stage_of: Sequence[int], num_stages: int
) -> dict[str, tuple[int, ...]]:
    """The stages that need each parameter and buffer, by every name it has.

    A tensor with several names (tied weights) gets the same stages under each. One that no unit holds and
    nothing was seen to read goes to the last stage; buffers outside units go everywhere.
    """
    readers = states_by_stage(trace, stage_of, num_stages)
    groups: dict[int, list[str]] = {}
    buffers = {name for name, _ in root.named_buffers(remove_duplicate=False)}
    states = [*named_parameters_of(root, remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    for name, tensor in states:
        groups.setdefault(id(tensor), []).append(name)
    held: dict[str, set[int]] = {}  # the same set under each name of a tensor
    for names in groups.values():
        stages = set().union(*(readers.get(name, set()) for name in names))
        stages |= {stage_of[trace.state_units[name]] for name in names if name in trace.state_units}
        if any(name in buffers and name not in trace.state_units for name in names):
            stages = set(range(num_stages))
        held.update(dict.fromkeys(names, stages or {num_stages - 1}))
    _with_what_they_are_made_of(held, trace)
    return {name: tuple(sorted(stages)) for name, stages in held.items()}


def states_by_stage(
    trace: Trace, stage_of: Sequence[int], num_stages: int, held: Mapping[str, Iterable[int]] | None = None
) -> dict[str, set[int]]:
    """The stages on which each parameter or buffer is read.

    Args:
        trace: Of the step.
        stage_of: The stage of each unit.
        num_stages: How many there are.
        held: By name, stages that have it, where that is known: what it is made of is read there too.
    """
    readers: dict[str, set[int]] = {}
    for call in trace.calls:
        for tag in call.reads:
            if tag.kind == "state":
                readers.setdefault(tag.name, set()).add(stage_of[call.unit])
    for tag in trace.tail:
        if tag.kind == "state":
            readers.setdefault(tag.name, set()).add(num_stages - 1)
    for name in trace.everywhere:
        readers.setdefault(name, set()).update(range(num_stages))
    if held is not None and trace.made_of:
        _with_what_they_are_made_of({name: readers.setdefault(name, set()) for name in held}, trace, held)
    return readers


def _with_what_they_are_made_of(
    stages: dict[str, set[int]], trace: Trace, held: Mapping[str, Iterable[int]] | None = None
) -> None:
    """Let weights that a step makes anew have beside them what it makes them of."""
    pairs = [(name, other) for name, others in trace.made_of.items() for other in others & stages.keys()]
    grown = True
    while grown:
        grown = False
        for name, other in pairs:
            missing = {*stages.get(name, ()), *(held or {}).get(name, ())} - stages[other]
            stages[other] |= missing
            grown |= bool(missing)


def goes_on(trace: Trace, stage_of: Sequence[int], stage: int) -> bool:
    """Whether a stage has to run the step to its end, for effects or hooks that come after its last call.

    Args:
        trace: Of the step.
        stage_of: The stage of each unit.
        stage: Which.
    """
    stages = [stage_of[call.unit] for call in trace.calls]
    last = max((index for index, found in enumerate(stages) if found == stage), default=-1)
    leaves = next((i for i, found in enumerate(stages) if i > last and found > stage), len(stages))
    positions = {place for one in trace.effects if not one.from_units for place in one.positions}
    positions |= {place for call, place in trace.hooked if stages[call] == stage}
    return any(position > leaves for position in positions)


class UnclearSizesError(BaseException):
    """What a unit returns for arguments of other sizes does not follow from what it returned before."""


class TracedOutputs(dict[tuple[int, int], TracedOutput]):
    """What calls of units, by unit and number of the call, return."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__({(call.unit, call.nth): (call.structure, call.specs) for call in calls})
        self._calls = {(call.unit, call.nth): call for call in calls}
        self._raises = False

    def strict(self) -> "TracedOutputs":
        """The same, which raises where sizes are not clear."""
        found = copy(self)
        found._raises = True
        return found

    def given(self, unit: int, nth: int, arguments: Any) -> TracedOutput:
        """What a call returns, where values such as lengths or a mask may give its arguments other sizes.

        Raises:
            UnclearSizesError: One of its own sizes could be another now, such as that of a layer of three
                features given three words. It is not the user's to catch.
        """
        call = self._calls[unit, nth]
        specs = call.resized(inputs_of(arguments))
        if specs is None and self._raises:
            raise UnclearSizesError
        return call.structure, specs or call.specs


class Calls(NamedTuple):
    """What tells the calls of a run of a step from those of another.

    Attributes:
        functions: Which functions were called between units, and how the flags of units stood; 0: no run has
            looked.
        standing: How units stood, with the numbers that they hold, which may be others in each batch.
    """

    functions: int
    standing: int


NO_CALLS = Calls(0, 0)


@dataclass(frozen=True, slots=True)
class Route:
    """One way through the model.

    Attributes:
        number: In the order in which they were seen, the same on all ranks.
        trace: Of the step on this way.
        liveness: What crosses the cuts.
        goes_on: By stage, whether it has to run the step to its end.
    """

    number: int
    trace: Trace
    liveness: Liveness
    goes_on: tuple[bool, ...]

    def looks_ahead(self, stages: Iterable[int]) -> bool:
        """Whether one of these stages needs to know what units of later ones return."""
        return any(self.liveness.meets_later_calls[stage] or self.goes_on[stage] for stage in stages)


def called_otherwise(whole: Route, own: Route, size: int, total: int) -> int | None:
    """The first unit that is called neither as often for a micro-batch as for the batch nor once a sample.

    Args:
        whole: The way of the batch.
        own: That of the micro-batch.
        size: Samples of the micro-batch.
        total: Of the batch.
    """
    of_batch, of_part = Counter(whole.trace.path), Counter(own.trace.path)
    others = (
        unit
        for unit in sorted(of_batch | of_part)
        if of_part[unit] != of_batch[unit] and of_part[unit] * total != of_batch[unit] * size
    )
    return next(others, None)


def check_ways(whole: Route, routes: Sequence[Route], sizes: Sequence[int]) -> None:
    """Refuse a step that goes another way for a micro-batch than for the batch, as its size decides.

    A loop over samples calls a unit as often as there are samples.

    Args:
        whole: The way of the batch.
        routes: Those of its micro-batches.
        sizes: Samples of each.

    Raises:
        SplitError: Some unit is called neither as often nor once for each sample.
    """
    for route, size in {
        (one.number, size): (one, size) for one, size in zip(routes, sizes, strict=True)
    }.values():
        unit = called_otherwise(whole, route, size, sum(sizes))
        if unit is not None:
            raise SplitError(
                f"unit {whole.trace.units[unit].name!r} is called {route.trace.path.count(unit)} times for a "
                f"micro-batch of {size} samples and {whole.trace.path.count(unit)} times for the batch of "
                f"{sum(sizes)}, so that {whole.trace.step} goes another way than on one device: decide by "
                "something else than how many samples there are, use num_microbatches=1, or put the choice "
                "into the forward of one module and keep that whole with "
                "PipelineStrategy(units=['<its name>'])"
            )


@dataclass(slots=True)
class Node:
    """All ways that begin with the same calls.

    Attributes:
        through: One of them.
        ends: The one that has no further call.
        following: By the turn of the unit that is called next; see `Trace.way`.
    """

    through: Route
    ends: Route | None = None
    following: dict[Hashable, "Node"] = field(default_factory=dict)


class StepRoutes:
    """The ways of one kind of step.

    Args:
        base: The first.
        modules: Whose attributes code between units may read.
    """

    def __init__(self, base: Route, modules: Sequence[nn.Module]) -> None:
        self.base = base
        self.known = {base.trace.way: base}
        self.ports: dict[tuple[int, int], PortSpec] = {}
        self.decisions = dict[Expression, None]()  # by numbers that change between batches
        self._numbers: dict[str, Place] = {}
        self.decided: dict[Hashable, tuple[Route, Calls]] = {}
        self.by_reads: dict[Hashable, Route | None] = {}
        self.by_form: dict[Hashable, tuple[Route, tuple[bool, ...], Calls]] = {}
        self.called_by: dict[Hashable, Calls] = {}  # what tells the functions called, by what was read
        self._modules = modules
        self.index_tried = False
        self.called: set[int] = set()
        self.unlooked: list[int] = []
        self.looks_otherwise = _MOST_OTHERWISE
        self._hidden = 0  # batches to look at yet, where no comparison shows what their index decides
        self._forms: set[Hashable] = set()  # of micro-batches whose way was found, until they do not matter
        self._passing: set[Hashable] = set()  # places that only change within a run
        self.start = Node(base)
        self.add(base)

    @property
    def varies(self) -> bool:
        """Whether there are several ways, or may be from one micro-batch to the next."""
        return self.base.trace.steered or len(self.known) > 1

    @property
    def calls(self) -> list[Call]:
        """Those of all ways."""
        return [call for route in self.known.values() for call in route.trace.calls]

    def add(self, route: Route) -> bool:
        """One more. Whether the step leaves something else behind on it."""
        self.known[route.trace.way] = route
        self._decides(route.trace.decisions, route.trace.numbers)
        self.ports.update(route.trace.ports)
        node = self.start
        for turn in route.trace.way:
            node = node.following.setdefault(turn, Node(route))
        node.ends = route
        return self._join(self.base.trace, route.trace)

    def looked(self, decisions: Decisions, places: Iterable[Place]) -> None:
        """A run of the step has shown by which numbers it decides.

        Args:
            decisions: Made in it.
            places: Of the numbers.
        """
        if self._hidden:
            self._hidden -= 1
            if not self._hidden and len(self.known) == 1:
                self.decisions.pop(_BY_INDEX, None)
        self.decides(decisions, places)

    def decides(self, decisions: Decisions, places: Iterable[Place]) -> None:
        """Numbers that change between batches decide so.

        Args:
            decisions: What was seen of them.
            places: Of the numbers.
        """
        labels = decisions.labels()
        self._decides(decisions.made, {place.label: place for place in places if place.label in labels})

    @property
    def follows_index(self) -> bool:
        """Whether something is known to be decided by the index of the batch."""
        return any(leaf == _BY_INDEX for one in self.decisions for leaf in leaves_of(one))

    def hide_index(self) -> None:
        """The index goes where no comparison is seen, as into a seed: each may be another way.

        If none is in as many batches as we look at, the index decides nothing.
        """
        self._hidden = _MOST_HIDDEN
        self._decides([_BY_INDEX], {})

    def _decides(self, decisions: Iterable[Expression], numbers: Mapping[str, Place]) -> None:
        """Where there are too many, as with the clock in them, the numbers themselves stand for all."""
        self._numbers.update(numbers)
        known = self.decisions
        self.decisions = {
            **known,
            **{one: None for one in decisions if not set(leaves_of(one)) <= known.keys()},
        }
        if len(self.decisions) > _MOST_DECISIONS:
            self.decisions = {leaf: None for one in self.decisions for leaf in leaves_of(one)}

    def unknown(
        self, changed: Sequence[tuple[Place, int]], written: Sequence[int] = (),
        by_values: Collection[Hashable] = (),
    ) -> list[Hashable]:  # fmt: skip
        """Which of the places that a run of the step has changed are not known to be so, or are not there.

        Args:
            changed: The places, each with the number of calls that there had been.
            written: Memory that it has written, by `storage_key`.
            by_values: Of these places those, by identity, whose value may depend on what units give.
        """
        held = (t for effect in self.base.trace.effects for t in standing_tensors(effect.place.get()))
        seen = {storage_key(tensor) for tensor in held} if written else set()
        more: list[Hashable] = [
            ("written", key) for key in written if key not in seen and ("written", key) not in self._passing
        ]
        known = {effect.place.identity: effect.positions for effect in self.base.trace.effects}
        for place, position in changed:
            key: Hashable = place.identity
            if key in known and position not in known[place.identity]:
                key = ("at", place.identity, position)
            if key not in known and key not in self._passing:
                more.append(key)
        alone = {effect.place.identity for effect in self.base.trace.effects if not effect.from_units}
        more += [
            ("by values", key)
            for key in by_values
            if key in alone and ("by values", key) not in self._passing
        ]
        return list(dict.fromkeys(more))

    def decided_by_value(self, places: Collection[Hashable]) -> None:
        """What a step changes or does not, as values of units decide.

        Args:
            places: Identities.
        """
        for effect in self.base.trace.effects:
            effect.by_value |= effect.place.identity in places

    def learn(self, trace: Trace, places: Sequence[Hashable]) -> bool:
        """Take what a step leaves behind from one more trace. Whether that is more than was known.

        Args:
            trace: Of a known way or another.
            places: That made it worth a trace; those that it does not show are left alone from now on.
        """
        stood = _positions(self.base.trace)
        like = self.known.get(trace.way)
        reads = like is not None and _join_reads(like.trace, trace)
        more = self._join(self.base.trace, trace) or _positions(self.base.trace) != stood
        self._decides(trace.decisions, trace.numbers)
        if more and trace.way in self.known and (same := self.known[trace.way]) is not self.base:
            self._join(same.trace, trace)
        known = {effect.place.identity for effect in self.base.trace.effects}
        self._passing.update(place for place in places if place not in known)
        return more or reads

    def put(self, routes: Sequence[Route]) -> None:
        """The same ways, of which more is known.

        Args:
            routes: All of them.
        """
        self.decided.clear()
        self.by_reads.clear()
        self.called_by.clear()
        self.by_form.clear()
        for route in routes:
            if route.number == self.base.number:
                self.base = route
            self.add(route)

    @staticmethod
    def _join(base: Trace, other: Trace) -> bool:
        """What a step does on one way or another, it may do."""
        known = {effect.place.identity for effect in base.effects}
        new = [effect for effect in other.effects if effect.place.identity not in known]
        others = {effect.place.identity: effect for effect in other.effects}
        grown = False
        for effect in base.effects:
            same = others.get(effect.place.identity, effect)
            grown |= (same.from_units, same.deep, same.retains) > (
                effect.from_units, effect.deep, effect.retains,
            )  # fmt: skip
            effect.positions |= same.positions
            effect.by_value |= same.by_value
            effect.from_units |= same.from_units
            effect.deep |= same.deep
            effect.retains |= same.retains
        base.effects = [*base.effects, *new]
        base.reads_gradients |= other.reads_gradients
        base.writes_batch |= other.writes_batch
        base.refills_batch |= other.refills_batch
        base.seeded_at = base.seeded_at or other.seeded_at
        base.late_states = sorted({*base.late_states, *other.late_states})
        base.losses_inside |= other.losses_inside
        base.weighted_inside.update(other.weighted_inside)
        return bool(new) or grown

    def key(self, microbatch: Microbatch, state: Hashable) -> Hashable:
        """What the way depends on, beside the numbers that code between units reads from tensors."""
        leaves, numbers = plain_leaves(*microbatch), self._outcomes(microbatch)
        if self.base.trace.steered or self.goes_by_form:
            return leaves, state, numbers, signature_of(*microbatch)
        return leaves, state, numbers

    @property
    def goes_by_form(self) -> bool:
        """Whether a way may follow from sizes, as a loop over the words of a text does."""
        return len(self._forms) < _FORMS or len(self.known) > 1

    def found(self, microbatch: Microbatch) -> None:
        """The way of a micro-batch was looked for."""
        if len(self._forms) < _FORMS:
            self._forms.add(signature_of(*microbatch))

    def _outcomes(self, microbatch: Microbatch) -> tuple[Any, ...]:
        """What is decided for a micro-batch by numbers that change between batches."""

        def at(label: str) -> Any:
            if label == INDEX:
                return microbatch[0][1]
            place = self._numbers.get(label)
            return None if place is None else place.get()

        return tuple(outcome(expression, at) for expression in self.decisions)

    def state(self, root: nn.Module) -> tuple[Hashable, Hashable]:
        """Flags and numbers of the module that a way may be chosen by, and what the step has set itself."""
        places = {
            effect.place.identity: effect.place
            for route in self.known.values()
            for effect in route.trace.effects
        }
        return plain_state(root, self._modules, set(places)), _set_yet(places.values())


def _join_reads(known: Trace, other: Trace) -> bool:
    """What a step reads of units in one run of a way, it may read in all of them. Whether that is more."""
    more = not other.tail <= known.tail
    known.tail |= other.tail
    known.result |= other.result
    for call, same in zip(known.calls, other.calls, strict=True):
        more |= not same.reads <= call.reads
        call.reads |= same.reads
    return more


def _positions(trace: Trace) -> dict[Hashable, set[int]]:
    """For each place that a step changes how many calls there had been, each time."""
    return {effect.place.identity: set(effect.positions) for effect in trace.effects}


def _set_yet(places: Iterable[Place]) -> tuple[Hashable, ...]:
    """For each place whether something stands there; the value of a flag, the first keys of a dictionary."""
    read = dict[int, Mapping[Any, Any]]()  # an owner's entries may have to be put together
    found: list[Hashable] = []
    for owner, key, _ in places:
        if type(owner) is Owner:
            value = owner.read().get(key, MISSING)
        else:
            value = read.setdefault(id(owner), owner.read()).get(key, MISSING)
        if type(value) is dict:
            found.append(tuple(key for key in list(value)[:_MOST_KEYS] if type(key) is str))
        else:
            found.append(value if value is None or type(value) is bool else value is MISSING)
    return tuple(found)


class StageDone(BaseException):
    """The stage's last unit has run and one of a later stage was called, or no more of the step is wanted."""
