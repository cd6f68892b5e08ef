"""A stage's part of a step: the user's own code runs, and only the units of the stage do work."""

from lightning_pipeline.model.replay.replay import Replay
from lightning_pipeline.model.replay.stage import StageProgram
from lightning_pipeline.model.replay.told import Sink, Told
from lightning_pipeline.model.replay.view import StageView, Step, StepResult, Table, WholeBatch

__all__ = [
    "Replay",
    "Sink",
    "StageProgram",
    "StageView",
    "Step",
    "StepResult",
    "Table",
    "Told",
    "WholeBatch",
]
