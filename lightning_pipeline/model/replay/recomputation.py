"""What a backward runs again: regions of activation checkpointing, with units in them or without."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import ValueKey
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.replay.between_units import GlueRun
from lightning_pipeline.model.replay.view import Returned, StageView
from lightning_pipeline.model.tensors import flatten, unflatten, user_line


class Recomputation(GlueRun):
    """Answers code as the forward of the micro-batch did: the same draws, values and placeholders.

    Args:
        view: Of the stage.
        seeds: The random numbers of the micro-batch.
        returned: What units of earlier stages returned.
        received: The tensors among that which arrived here.
        places: For each unit that the step calls several times, where the random state stood at each call.
        watches: Whether there may be code between units that runs again.

    Attributes:
        reentrant: Whether regions were asked for with `use_reentrant=True`.
    """

    def __init__(
        self, view: StageView, seeds: MicrobatchSeeds, returned: Returned,
        received: dict[ValueKey, Tensor], places: dict[int, list[Any]], *, watches: bool,
    ) -> None:  # fmt: skip
        super().__init__(view, seeds, returned, received)
        self._places, self._watches = places, watches
        self.reentrant = False

    def running(self) -> AbstractContextManager[Any]:
        """For the length of the backward."""
        self._seeds.backward(self._view.index)
        stack = ExitStack()
        if self._watches:
            stack.enter_context(self.functions)
            stack.enter_context(self._poison)
        return stack

    def close(self) -> None:
        """Let go of all values. This object is part of a circle, which is collected some time later."""
        self._received = {}

    @property
    def watcher(self) -> "Recomputation | None":
        """Who sees operations on placeholders."""
        return self if self._watches else None

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        view = self._view
        stage = view.stage_of[unit]
        if stage == view.index:
            return self._own(unit, args, kwargs)
        if stage < view.index and self._watches:
            output = self._hand_out(unit, self._nth(unit), args, kwargs)
            self._put_off.clear()  # they ran in the forward
            return output
        assert view.idle is not None, "a stage belongs to a split model"
        return view.idle.call(unit, args, kwargs)

    def _own(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = {(nth, leaf) for one, nth, leaf in self._view.mutated if one == unit}
        nth = self._nth(unit) if changed else 0
        hooks, (forward, entered) = self._hooks_of(unit), self._enter(unit)
        try:
            output = forward(*(args if hooks is None else hooks.before(args)), **kwargs)
            output = output if hooks is None else hooks.after(output)
        finally:
            self.inside = False
        self._leave(unit, entered, args, kwargs)
        if not changed:
            return output
        tensors, structure = flatten(output)
        return unflatten([t.clone() if (nth, i) in changed else t for i, t in enumerate(tensors)], structure)

    def _nth(self, unit: int) -> int:
        """Which call of the unit this is. Checkpointing puts the random state back, which tells."""
        if unit not in self._view.repeated or len(self._places[unit]) == 1:
            return 0
        found = [nth for nth, place in enumerate(self._places[unit]) if place == self._seeds.place()]
        if len(found) == 1:
            return found[0]
        raise SplitError(
            f"unit {self._view.unit_name(unit)!r} is called several times in a step and again by "
            "activation checkpointing, which did not put the random state back, so that the calls cannot be "
            "told apart: checkpoint with preserve_rng_state=True, or without seeding in the step [at "
            f"{user_line(self._view.root)}]"
        )
