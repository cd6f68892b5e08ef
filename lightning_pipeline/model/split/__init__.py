"""The module that is cut into stages: all that a rank does with its own, batch by batch."""

from lightning_pipeline.model.split.known_steps import Doubts
from lightning_pipeline.model.split.model import SplitModel
from lightning_pipeline.model.split.outside_steps import OutsideSteps

__all__ = ["Doubts", "OutsideSteps", "SplitModel"]
