"""A stage's part of the module, driven through the user's own step."""

from lightning_pipeline.model.replay.model import SplitModel

__all__ = ["SplitModel"]
