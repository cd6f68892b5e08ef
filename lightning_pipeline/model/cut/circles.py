"""Other units where those of a module are too few: without small ones that close a circle, or merged."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import networkx
from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut.graph import CIRCLE, Atom, atoms_of
from lightning_pipeline.model.trace import Trace, Unit

_SMALL = 20  # so many times fewer parameters than what it keeps together


def opened(units: Sequence[Unit], num_stages: int, trace: Callable[[list[Unit]], Trace]) -> Trace:
    """A trace whose units can be shared out over stages, where few of them are in the way.

    A unit that is called at the beginning and again at the end keeps all between on its stage. A small one
    without buffers is then left to the code between units, which every stage runs. And units that are tied to
    the end of the step, such as layers that an autograd function calls, are not where they are one: the
    module around them, where no other unit is in it.

    Args:
        units: All of the module.
        num_stages: That are asked for.
        trace: Traces the step with given units.
    """
    first = trace(list(units))
    atoms = atoms_of(first)
    if len(atoms) >= num_stages:
        return first
    for fewer in (*_without_closing(first, atoms, num_stages), *_merged(first, atoms)):
        try:
            other = trace(fewer)
        except SplitError:
            continue  # the first refusal is the one to read
        if len(atoms_of(other)) >= num_stages and _calls_all_new(other, first):
            return other
    return first


def _calls_all_new(other: Trace, first: Trace) -> bool:
    """Whether a step calls the modules that are units now; else its code between them has what is in one."""
    known = {unit.name for unit in first.units}
    return all(unit.name in known or number in other.path for number, unit in enumerate(other.units))


def _without_closing(trace: Trace, atoms: Sequence[Atom], num_stages: int) -> Iterator[list[Unit]]:
    closing = {unit for atom in atoms for unit in _closing(trace, atom)}
    if closing and _num_left(trace, closing) >= num_stages:
        yield [unit for number, unit in enumerate(trace.units) if number not in closing]


def _num_left(trace: Trace, out: set[int]) -> int:
    """How many atoms there are at most where some units are code between the others."""
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(set(range(len(trace.units))) - out)
    handed: list[set[int]] = []  # units whose values each call passes on
    for call in trace.calls:
        read = set[int]().union(*(handed[tag.call] for tag in call.reads if tag.kind == "value"))
        if call.unit not in out:
            graph.add_edges_from((unit, call.unit) for unit in read)
        handed.append(read if call.unit in out else {call.unit})
    return int(networkx.number_strongly_connected_components(graph))


def _closing(trace: Trace, atom: Atom) -> list[int]:
    """Units of an atom that are called again and are together small beside it."""
    if not atom.reason.startswith(CIRCLE):
        return []
    called = [call.unit for call in trace.calls]
    sizes = {unit: trace.units[unit].num_parameters for unit in atom.units}
    again = [
        unit
        for unit in atom.units
        if called.count(unit) > 1 and not any(True for _ in trace.units[unit].module.buffers())
    ]
    again.sort(key=lambda unit: sizes[unit])
    up_to = accumulate(sizes[unit] for unit in again)
    most = sum(sizes.values())
    return [unit for unit, size in zip(again, up_to, strict=True) if size * _SMALL <= most]


def _merged(trace: Trace, atoms: Sequence[Atom]) -> Iterator[list[Unit]]:
    """Units with the module around a group that is tied to the unit called last in its place."""
    last = {call.unit for call in trace.calls[-1:]}
    for group, _ in trace.together:
        around = _around(trace, [trace.units[unit].name for unit in group - last])
        inside = {number for number, unit in enumerate(trace.units) if unit.name.startswith(f"{around}.")}
        if around and last <= group and any(inside <= set(atom.units) for atom in atoms):
            place = min(inside)
            module = Unit(around, trace.root.get_submodule(around))
            rest = [(number, unit) for number, unit in enumerate(trace.units) if number not in inside]
            yield [unit for _, unit in sorted([*rest, (place, module)], key=lambda one: one[0])]


def _around(trace: Trace, names: Sequence[str]) -> str:
    """The name of the smallest module with a forward of its own that holds all these; empty for the root."""
    common = names[0].split(".")[:-1] if names else []
    while common:
        name = ".".join(common)
        inside = all(one.startswith(f"{name}.") for one in names)
        if inside and type(trace.root.get_submodule(name)).forward is not nn.Module.forward:
            return name
        common.pop()
    return ""
