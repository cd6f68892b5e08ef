"""Code around a step calls a unit: own ones run, those of other stages raise."""

from typing import Any

from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.replay.stage import StageProgram
from lightning_pipeline.model.tensors import user_line
from lightning_pipeline.model.trace import UnitPatches


class IdleRunner:
    """Answers calls of units outside a step: own ones run, those of other stages raise."""

    inside = False

    def __init__(self, root: nn.Module, patches: UnitPatches, programs: dict[int, StageProgram]) -> None:
        self._root, self._patches, self._programs = root, patches, programs

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an own unit, or raise."""
        program = next(iter(self._programs.values()))
        if program.stage_of[unit] in self._programs:
            return self._patches.originals[unit](*args, **kwargs)
        raise SplitError(
            f"unit {self._patches.units[unit].name!r} is on stage {program.stage_of[unit]} and is called "
            "outside a step on a rank that does not hold it: do this in validation_step or predict_step, "
            f"which run across the stages, or on the whole model after fit [at {user_line(self._root)}]"
        )
