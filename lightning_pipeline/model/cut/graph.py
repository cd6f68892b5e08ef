"""The units as a graph of data flow, and the atoms that a partition may not cut."""

from collections.abc import Sequence
from dataclasses import dataclass

import networkx

from lightning_pipeline.model.tensors import Tag
from lightning_pipeline.model.trace import Call, Trace

CIRCLE = "values flow in a circle between them"


@dataclass(frozen=True, slots=True)
class Atom:
    """Units that must share a stage.

    Attributes:
        units: Their numbers, in the order of their first calls.
        reason: Why they are together; empty for a single unit.
    """

    units: tuple[int, ...]
    reason: str = ""


def atoms_of(trace: Trace) -> list[Atom]:
    """Order the units so that every value flows forward, with what cannot be ordered as one atom.

    Source: the strongly connected components of the graph of units, calls merged per unit; two siamese
    passes are no cycle, a recurrence is one.
    """
    graph, reasons = _unit_graph(trace)
    first = _first_positions(trace)
    condensed = networkx.condensation(graph)
    members = {
        node: tuple(sorted(data["members"], key=lambda u: first[u])) for node, data in condensed.nodes.items()
    }
    order = networkx.lexicographical_topological_sort(
        condensed, key=lambda node: (first[members[node][0]], node)
    )
    return [Atom(members[node], _reason(trace, members[node], reasons)) for node in order]


def _unit_graph(trace: Trace) -> tuple["networkx.DiGraph[int]", list[tuple[frozenset[int], str]]]:
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(range(len(trace.units)))
    reasons = list(trace.together)
    for call in trace.calls:
        for tag in call.reads:
            if tag.kind == "value":
                graph.add_edge(trace.calls[tag.call].unit, call.unit)
            elif tag.kind == "effect" and tag.call != call.index:
                reasons.append(_effect(trace, trace.calls[tag.call], call))
    for tag in trace.tail:
        if tag.kind == "effect":
            group = frozenset({trace.calls[tag.call].unit, *_last_units(trace)})
            reasons.append(
                (group, f"{_name(trace, tag)} changes something that the end of {trace.step} reads")
            )
    for group, _ in reasons:
        units = sorted(group)
        graph.add_edges_from(zip(units, units[1:] + units[:1], strict=True))
    return graph, reasons


def torn(trace: Trace, stage_of: Sequence[int]) -> str:
    """Why a step does not fit a partition, where units that must be together are on several stages."""
    for group, reason in _unit_graph(trace)[1]:
        if len({stage_of[unit] for unit in group}) > 1:
            return f"{[trace.units[unit].name for unit in sorted(group)]} must share a stage: {reason}"
    return ""


def _effect(trace: Trace, source: Call, reader: Call) -> tuple[frozenset[int], str]:
    names = [trace.units[source.unit].name, trace.units[reader.unit].name]
    return frozenset(
        {source.unit, reader.unit}
    ), f"{names[1]!r} reads what {names[0]!r} changes beside its output"


def _name(trace: Trace, tag: Tag) -> str:
    return repr(trace.units[trace.calls[tag.call].unit].name)


def _last_units(trace: Trace) -> set[int]:
    return {trace.calls[-1].unit} if trace.calls else set()


def _first_positions(trace: Trace) -> dict[int, float]:
    """Where each unit comes first; one that is never called follows its predecessor in the module tree."""
    positions: dict[int, float] = {}
    for call in trace.calls:
        positions.setdefault(call.unit, float(call.index))
    previous = -1.0
    for unit in range(len(trace.units)):
        if unit not in positions:
            positions[unit] = previous + 1e-3
        previous = positions[unit]
    return positions


def _reason(trace: Trace, units: tuple[int, ...], reasons: list[tuple[frozenset[int], str]]) -> str:
    if len(units) == 1:
        return ""
    found = [text for group, text in reasons if len(group) > 1 and group <= set(units)]
    if found:
        return found[0]
    again = sorted(unit for unit in units if [call.unit for call in trace.calls].count(unit) > 1)
    names = ", ".join(repr(trace.units[unit].name) for unit in again[:3])
    return f"{CIRCLE}: {names} {'are' if len(again) > 1 else 'is'} called again" if again else CIRCLE
