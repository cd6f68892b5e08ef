"""Batches to come, in which a step decides otherwise by an index, a count or the trainer's numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning_pipeline.model.places import INDEX, Place, leaves_of, outcome
from lightning_pipeline.model.trace.record import Trace
from lightning_pipeline.registry import parameters_of

_DISTANCES = (*range(1, 17), 20, 25, 32, 50, 64, 100, 128, 200, 256, 500, 512, 1000, 1024, 2000, 5000, 10_000)
_MOST = 3  # runs of a step beside its first


class Ahead(NamedTuple):
    """A run of a step as in a batch to come.

    Attributes:
        by: So much larger are the numbers by which it decides.
        counted: Places of numbers that the step changes itself, by which it may decide, too.
    """

    by: int = 0
    counted: tuple[Place, ...] = ()

    def arguments(self, args: tuple[Any, ...], index: int | None) -> tuple[Any, ...]:
        """Arguments of the step with the index of that batch."""
        return args if index is None or not self.by else (args[0], index + self.by, *args[2:])

    @contextmanager
    def standing(self, places: Sequence[Place]) -> Iterator[None]:
        """Inside, whole numbers stand in these places as they may in that batch."""
        held = [(place, place.get()) for place in places if self.by and type(place.get()) is int]
        for place, value in held:
            place.put(value + self.by)
        try:
            yield
        finally:
            for place, value in held:
                place.put(value)


def has_weights_apart(trace: Trace) -> bool:
    """Whether a unit has weights that no gradient reaches, such as a target network, which a step may write.

    A run as in another batch does what the user does there: it is made only where weights may be written.

    Args:
        trace: Of the step.
    """
    reached = {call.unit for call in trace.calls if any(spec.requires_grad for spec in call.specs)}
    called = {call.unit for call in trace.calls} - reached
    return any(next(parameters_of(trace.units[unit].module), None) is not None for unit in called)


def distances(trace: Trace, counted: Sequence[Place]) -> Iterator[int]:
    """How far ahead there are batches in which the step decides what it has not decided in those before.

    Args:
        trace: Of the step, whose decisions by the counted numbers are noted, too.
        counted: Places of numbers that it changes itself.
    """
    start = {label: place.get() for label, place in trace.numbers.items()}
    start |= {INDEX: trace.index} | {place.label: place.get() for place in counted}
    pending = {
        one: made for one, made in trace.decisions.items() if type(made) is bool and _is_known(one, start)
    }
    found = 0
    for distance in _DISTANCES:

        def at(label: str, distance: int = distance) -> Any:
            return start[label] + distance

        other = [one for one, made in pending.items() if outcome(one, at) not in (None, made)]
        if other and found < _MOST:
            found += 1
            yield distance
        for one in other:
            del pending[one]


def _is_known(expression: Any, start: dict[str, Any]) -> bool:
    return all(type(start.get(leaf[1])) is int for leaf in leaves_of(expression))
