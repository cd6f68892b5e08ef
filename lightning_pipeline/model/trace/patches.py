"""Put ourselves between the caller of a unit and its forward, without replacing any module object."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lightning_pipeline.model.trace.units import Unit


class Runner(Protocol):
    """Decides what a call of a unit does: a trace, a replay, or nothing special."""

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of unit number `unit`."""
        ...


class UnitPatches:
    """The patched `forward` of every unit. Calls go to the current `runner`, or to the original.

    Attributes:
        units: The units, in the order of their numbers.
        originals: What `forward` was before, one per unit; an instance's own `forward` is kept.
        runner: Who answers calls now. None: `idle` does.
        idle: Who answers outside a step. None: the original does.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.originals: list[Callable[..., Any]] = [_original(unit) for unit in self.units]
        self.runner: Runner | None = None
        self.idle: Runner | None = None
        self._own = [vars(unit.module).get("forward") for unit in self.units]

    def install(self) -> None:
        """Patch every unit."""
        for number, unit in enumerate(self.units):
            vars(unit.module)["forward"] = self._answer(number)

    def remove(self) -> None:
        """Give every unit its own `forward` back."""
        for unit, own in zip(self.units, self._own, strict=True):
            vars(unit.module).pop("forward", None)
            if own is not None:
                vars(unit.module)["forward"] = own

    def _answer(self, number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            runner = self.runner or self.idle
            if runner is None:
                return self.originals[number](*args, **kwargs)
            return runner.call(number, args, kwargs)

        return forward


def _original(unit: Unit) -> Callable[..., Any]:
    forward: Callable[..., Any] = unit.module.forward
    return forward
