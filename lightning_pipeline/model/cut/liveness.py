"""Which values each boundary message carries, and which stages need which parameter."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_pipeline.model.trace import Trace

ValueKey = tuple[int, int, int]  # unit, which call of it, which output tensor


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
    states = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
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
