"""Choose where the model is cut."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from lightning_pipeline.errors import PartitionError
from lightning_pipeline.model.cut.graph import Atom, atoms_of, torn
from lightning_pipeline.model.cut.table import StageRow, StageTable
from lightning_pipeline.model.cut.ways import (
    Liveness,
    backward_edges,
    liveness_of,
    stages_of_states,
    states_by_stage,
)
from lightning_pipeline.model.trace import Trace, Unit, finer_names
from lightning_pipeline.registry import named_parameters_of, parameters_of

SLACK = 0.02  # how much slower the slowest stage may be for a smaller message
BACKWARD_SHARE = 2.0  # a backward costs about twice a forward


@dataclass
class Partition:
    """The units shared out over stages.

    Attributes:
        trace: What it was chosen from.
        atoms: The atoms in the order of data flow.
        bounds: Positions of atoms where stages begin and the last one ends: `num_stages + 1` numbers.
        how: How it was chosen, in words.
    """

    trace: Trace
    atoms: tuple[Atom, ...]
    bounds: tuple[int, ...]
    how: str
    num_parameters: tuple[int, ...] = ()  # of each stage, tied ones counted on each stage that holds them

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def stage_of(self) -> list[int]:
        """The stage of each unit, by its number."""
        stages = [0] * len(self.trace.units)
        for stage, (start, end) in enumerate(pairwise(self.bounds)):
            for atom in self.atoms[start:end]:
                for unit in atom.units:
                    stages[unit] = stage
        return stages

    def units_of(self, stage: int) -> list[int]:
        """Numbers of the units of a stage, in order."""
        start, end = self.bounds[stage], self.bounds[stage + 1]
        return [unit for atom in self.atoms[start:end] for unit in atom.units]

    def take_in(self, unit: Unit, stage: int) -> None:
        """One more unit, which has come in a run.

        Args:
            unit: It gets the next number.
            stage: Where it goes.
        """
        units, place = self.trace.units, self.bounds[stage + 1] - 1
        units.append(unit)
        atom = replace(self.atoms[place], units=(*self.atoms[place].units, len(units) - 1))
        self.atoms = (*self.atoms[:place], atom, *self.atoms[place + 1 :])
        if self.num_parameters:
            counts = list(self.num_parameters)
            counts[stage] += unit.num_parameters
            self.num_parameters = tuple(counts)

    def liveness(self, trace: Trace | None = None) -> Liveness:
        """What crosses the cuts, in the step it was chosen from or in another one."""
        return liveness_of(trace or self.trace, self.stage_of, self.num_stages)

    def table(self) -> StageTable:
        """The stages as a table that prints."""
        costs = unit_costs(self.trace)
        total = sum(costs) or 1.0
        messages = self.liveness().messages
        sizes = value_sizes(self.trace)
        rows = []
        for stage in range(self.num_stages):
            units = self.units_of(stage)
            rows.append(
                StageRow(
                    stage=stage,
                    units=tuple(self.trace.units[unit].name for unit in units),
                    num_parameters=self.num_parameters[stage],
                    cost_share=sum(costs[unit] for unit in units) / total,
                    message_bytes=sum(sizes[key] for key in messages[stage]),
                    message_tensors=len(messages[stage]),
                    reason=self._reason(stage) if stage else "the first unit",
                )
            )
        return StageTable(tuple(rows), self.how)

    def counted(self) -> "Partition":
        """The same with the parameters of each stage counted, which is done while the module is whole."""
        needed = stages_of_states(self.trace.root, self.trace, self.stage_of, self.num_stages)
        counts = [0] * self.num_stages
        for name, parameter in named_parameters_of(self.trace.root):
            for stage in needed[name]:
                counts[stage] += parameter.numel()
        return replace(self, num_parameters=tuple(counts))

    def first_units(self) -> list[str]:
        """The first unit of each stage but the first: `partition=` for this cut."""
        starts = self.bounds[1:-1]
        return [self.trace.units[self.atoms[start].units[0]].name for start in starts]

    def moves(self) -> Iterator["Move"]:
        """The cuts beside this one: with one atom over one boundary, where a stage keeps another."""
        for boundary in range(1, self.num_stages):
            for atom, source, to in (
                (self.bounds[boundary] - 1, boundary - 1, boundary),
                (self.bounds[boundary], boundary, boundary - 1),
            ):
                if self.bounds[source + 1] - self.bounds[source] > 1:
                    yield Move(self._moved(boundary, atom, source, to), atom, source, to)

    def _moved(self, boundary: int, atom: int, source: int, to: int) -> "Partition":
        bounds, parameters = list(self.bounds), list(self.num_parameters)
        bounds[boundary] += source - to
        if parameters:
            count = _distinct_parameters(self.trace, list(self.atoms[atom].units))
            parameters[source] -= count
            parameters[to] += count
        return replace(self, bounds=tuple(bounds), num_parameters=tuple(parameters))

    def _reason(self, stage: int) -> str:
        atom = self.atoms[self.bounds[stage]]
        return f"{self.how}; kept whole: {atom.reason}" if atom.reason else self.how


class Move(NamedTuple):
    """One atom, the stage that it leaves, the one that it goes to, and the cut that this makes."""

    cut: Partition
    atom: int
    source: int
    to: int


def misfit(trace: Trace, cut: Partition, needed: Mapping[str, Sequence[int]]) -> str:
    """Why stages, as they are cut, cannot run a step; empty where they can.

    Args:
        trace: Of the step.
        cut: What was cut by another trace.
        needed: The stages that have each parameter and buffer, by name.
    """
    stage_of = cut.stage_of
    for name, stages in states_by_stage(trace, stage_of, cut.num_stages, needed).items():
        if not stages <= set(needed.get(name, stages)):
            return f"{name!r} is used on a stage that does not hold it"
    wrong = backward_edges(trace, stage_of)
    if wrong:
        return f"the output of {wrong[0][0]!r} flows into {wrong[0][1]!r}, on an earlier stage"
    return torn(trace, stage_of)


def partition(
    trace: Trace,
    num_stages: int,
    *,
    how: str | Sequence[str] = "auto",
    tried: Callable[[list[str]], bool] | None = None,
) -> Partition:
    """Share the units of a trace out over stages.

    Args:
        trace: From `trace_step`.
        num_stages: How many stages.
        how: "auto" makes the costliest stage as cheap as can be and, within 2 % of that, the messages
            small; "parameters" balances parameters, "uniform" the number of units. A list names the first
            unit of each stage but the first.
        tried: Whether patterns give enough units, which is then what is said of too few; None says it of
            what may.

    Raises:
        PartitionError: There are fewer atoms than stages, or a name is no module, out of order, or inside
            something that cannot be cut.
    """
    atoms = tuple(atoms_of(trace))
    if isinstance(how, str) and len(atoms) < num_stages:
        raise PartitionError(_too_few(trace, atoms, num_stages, tried))
    return _choose(trace, atoms, num_stages, how).counted()


def _choose(trace: Trace, atoms: tuple[Atom, ...], num_stages: int, how: str | Sequence[str]) -> Partition:
    if not isinstance(how, str):
        return Partition(trace, atoms, _named_bounds(trace, atoms, list(how), num_stages), "asked for")
    if how == "uniform":
        size, extra = divmod(len(atoms), num_stages)
        bounds = [0]
        for stage in range(num_stages):
            bounds.append(bounds[-1] + size + (stage < extra))
        return Partition(trace, atoms, tuple(bounds), "equal numbers of units")
    if how == "parameters":
        weights = [float(_distinct_parameters(trace, list(atom.units))) for atom in atoms]
        return Partition(trace, atoms, _balance(trace, atoms, weights, num_stages), "equal parameters")
    if how != "auto":
        raise PartitionError(
            f"partition={how!r} is not known: use 'auto', 'uniform', 'parameters' or a list of units"
        )
    costs = unit_costs(trace)
    weights = [sum(costs[unit] for unit in atom.units) for atom in atoms]
    return Partition(
        trace, atoms, _balance(trace, atoms, weights, num_stages), "least cost of the slowest stage"
    )


def _too_few(
    trace: Trace, atoms: Sequence[Atom], num_stages: int, tried: Callable[[list[str]], bool] | None
) -> str:
    bound = [f"{[trace.units[u].name for u in atom.units]} ({atom.reason})" for atom in atoms if atom.reason]
    finer = finer_names(trace.units)[:3]
    helps = bool(finer) and (tried is None or tried(finer))
    advice = f", or split finer with units={finer}" if helps else ""
    together = f"; kept together: {'; '.join(bound)}" if bound else ""
    if bound and trace.step == "training_step" and len(trace.units) >= num_stages:
        advice += "; or whole_steps=True, which calls them where they are, one stage after the other"
    return (
        f"{num_stages} stages were asked for, but the model has {len(atoms)} "
        f"unit{'s' if len(atoms) != 1 else ''} to share out{together}: use at most "
        f"{len(atoms)} stages, which are stages * stages_per_rank{advice}"
    )


def _named_bounds(trace: Trace, atoms: Sequence[Atom], names: list[str], num_stages: int) -> tuple[int, ...]:
    if len(names) != num_stages - 1:
        raise PartitionError(
            f"partition names {len(names)} units, but {num_stages} stages have {num_stages - 1} boundaries: "
            "name the first unit of each stage but the first"
        )
    positions = [_position(trace, atoms, name) for name in names]
    bounds = (0, *positions, len(atoms))
    for name, (before, here) in zip(names, pairwise(bounds), strict=False):
        if here <= before:
            raise PartitionError(f"partition={names} is out of order at {name!r}: a stage would have no unit")
    return bounds


def _position(trace: Trace, atoms: Sequence[Atom], name: str) -> int:
    names = [unit.name for unit in trace.units]
    matches = [n for n, unit in enumerate(names) if unit == name or unit.startswith(f"{name}.")]
    if not matches:
        whole = [unit for unit in names if name.startswith(f"{unit}.")]
        inside = (
            f"it is inside the unit {whole[0]!r}, which is never cut" if whole else "no unit has that name"
        )
        raise PartitionError(f"partition names {name!r}, but {inside}; the units are {', '.join(names)}")
    place = {unit: index for index, atom in enumerate(atoms) for unit in atom.units}
    position = min(place[unit] for unit in matches)
    atom = atoms[position]
    if atom.units[0] not in matches:
        raise PartitionError(
            f"partition cannot cut at {name!r}: {[names[u] for u in atom.units]} are together, {atom.reason}"
        )
    return position


def _balance(
    trace: Trace, atoms: Sequence[Atom], weights: Sequence[float], num_stages: int
) -> tuple[int, ...]:
    """Exact min-max over contiguous atoms, then the smallest messages within `SLACK` of it."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    def span(start: int, end: int) -> float:
        return sums[end] - sums[start]

    worst, _ = _best_bounds(len(atoms), num_stages, lambda start, end: span(start, end), max)
    limit = worst * (1 + SLACK)
    cuts = _cut_bytes(trace, atoms)
    largest = max(cuts) or 1.0  # in shares of it, or the tie-break below would be lost in rounding

    def message(start: int, end: int) -> float:
        return (
            cuts[start] / largest + 1e-6 * span(start, end) ** 2 / (sums[-1] ** 2 or 1)
            if span(start, end) <= limit
            else float("inf")
        )

    return _best_bounds(len(atoms), num_stages, message, lambda a, b: a + b)[1]


def _best_bounds(
    count: int, parts: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The cheapest cut of `count` things into `parts` runs, by dynamic programming in O(parts count^2)."""
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, (0,))] + [None] * count
    for part in range(1, parts + 1):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            for start in range(part - 1, end):
                known = best[start]
                if known is None:
                    continue
                value = join(known[0], cost(start, end)) if part > 1 else cost(start, end)
                found = following[end]
                if found is None or value < found[0]:
                    following[end] = (value, (*known[1], end))
        best = following
    result = best[count]
    assert result is not None, "there are at least as many things as parts"
    return result


def _cut_bytes(trace: Trace, atoms: Sequence[Atom]) -> list[float]:
    """Bytes of the message at a cut before each atom."""
    stage_of = [0] * len(trace.units)
    for position, atom in enumerate(atoms):
        for unit in atom.units:
            stage_of[unit] = position
    sizes = value_sizes(trace)
    messages = liveness_of(trace, stage_of, len(atoms)).messages
    return [float(sum(sizes[key] for key in keys)) for keys in messages]


def value_sizes(trace: Trace) -> dict[tuple[int, int, int], int]:
    """Bytes of every output tensor of a unit, by unit, which call of it, and which tensor."""
    return {
        (call.unit, call.nth, leaf): spec.num_bytes
        for call in trace.calls
        for leaf, spec in enumerate(call.specs)
    }


def unit_costs(trace: Trace) -> list[float]:
    """Forward and backward of each unit in equivalent FLOPs; a frozen one's backward is cheaper."""
    costs = [0.0] * len(trace.units)
    for call in trace.calls:
        backward = BACKWARD_SHARE if any(spec.requires_grad for spec in call.specs) else 0.0
        costs[call.unit] += call.cost * (1.0 + backward)
    return costs


def _distinct_parameters(trace: Trace, units: Sequence[int]) -> int:
    found = {id(p): p.numel() for unit in units for p in parameters_of(trace.units[unit].module)}
    return sum(found.values())
