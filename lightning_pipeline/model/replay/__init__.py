"""A stage's part of the module, driven through the user's own step."""

from lightning_pipeline.model.replay.model import SplitModel, StepResult
from lightning_pipeline.model.replay.outside_steps import OutsideSteps
from lightning_pipeline.model.replay.told import Heard
from lightning_pipeline.model.replay.view import WholeBatch

__all__ = ["Heard", "OutsideSteps", "SplitModel", "StepResult", "WholeBatch"]
