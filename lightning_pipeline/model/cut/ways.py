"""The ways of a step through the model: which units a micro-batch calls, in order, and what crosses cuts."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_pipeline.data import signature_of
from lightning_pipeline.model.cut.liveness import Liveness
from lightning_pipeline.model.tensors import Structure, TensorSpec
from lightning_pipeline.model.trace import Call, Place, PortSpec, Trace, plain_leaves, plain_state

Microbatch = tuple[tuple[Any, ...], dict[str, Any]]
TracedOutput = tuple[Structure, list[TensorSpec]]


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


@dataclass(slots=True)
class Node:
    """All ways that begin with the same calls.

    Attributes:
        through: One of them.
        ends: The one that has no further call.
        following: By the unit that is called next.
    """

    through: Route
    ends: Route | None = None
    following: dict[int, "Node"] = field(default_factory=dict)


class StepRoutes:
    """The ways of one kind of step.

    Args:
        base: The first.
        modules: Whose attributes code between units may read.
    """

    def __init__(self, base: Route, modules: Sequence[nn.Module]) -> None:
        self.base = base
        self.known = {base.trace.path: base}
        self.ports: dict[tuple[int, int], PortSpec] = {}
        self.decided: dict[Hashable, Route] = {}
        self.by_reads: dict[Hashable, Route | None] = {}
        self._modules = modules
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
        self.known[route.trace.path] = route
        self.ports.update(route.trace.ports)
        node = self.start
        for unit in route.trace.path:
            node = node.following.setdefault(unit, Node(route))
        node.ends = route
        return self._join(self.base.trace, route.trace)

    def unknown(self, changed: Sequence[Place]) -> list[Hashable]:
        """Which of the places that a run of the step has changed are not known to be.

        Args:
            changed: The places.
        """
        known = {effect.place.identity for effect in self.base.trace.effects} | self._passing
        return [place.identity for place in changed if place.identity not in known]

    def learn(self, trace: Trace, places: Sequence[Hashable]) -> bool:
        """Take what a step leaves behind from one more trace. Whether that is more than was known.

        Args:
            trace: Of a known way or another.
            places: That made it worth a trace; those that it does not show are left alone from now on.
        """
        more = self._join(self.base.trace, trace)
        if more and trace.path in self.known and (same := self.known[trace.path]) is not self.base:
            self._join(same.trace, trace)
        known = {effect.place.identity for effect in self.base.trace.effects}
        self._passing.update(place for place in places if place not in known)
        return more

    def put(self, routes: Sequence[Route]) -> None:
        """The same ways, of which more is known.

        Args:
            routes: All of them.
        """
        self.decided.clear()
        self.by_reads.clear()
        for route in routes:
            if route.number == self.base.number:
                self.base = route
            self.add(route)

    @staticmethod
    def _join(base: Trace, other: Trace) -> bool:
        """What a step does on one way or another, it may do."""
        known = {effect.place.identity for effect in base.effects}
        new = [effect for effect in other.effects if effect.place.identity not in known]
        base.effects = [*base.effects, *new]
        base.writes_batch |= other.writes_batch
        base.late_states = sorted({*base.late_states, *other.late_states})
        base.losses_inside |= other.losses_inside
        base.weighted_inside.update(other.weighted_inside)
        return bool(new)

    def key(self, microbatch: Microbatch, state: Hashable) -> Hashable:
        """What the way depends on, beside the numbers that code between units reads from tensors."""
        trace = self.base.trace
        index = microbatch[0][1] if trace.steered_by_index else None
        if trace.steered:
            return plain_leaves(*microbatch), state, index, signature_of(*microbatch)
        return plain_leaves(*microbatch), state, index

    def state(self, root: nn.Module) -> Hashable:
        """Flags and numbers of the module that a way may be chosen by."""
        changed = {
            (effect.place.owner.identity, effect.place.key)
            for route in self.known.values()
            for effect in route.trace.effects
        }
        return plain_state(root, self._modules, changed)


class StageDone(BaseException):
    """The stage's last unit has run and one of a later stage was called, or no more of the step is wanted."""
