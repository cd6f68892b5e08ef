"""One run of a Trainer: from setup to teardown, and one batch in it."""

from lightning_pipeline.run.answers import Answers
from lightning_pipeline.run.checkpoints import CheckpointHooks
from lightning_pipeline.run.checks import check_run
from lightning_pipeline.run.forecasting import PRECISIONS, Prospect
from lightning_pipeline.run.on_demand import OptimizersOnDemand
from lightning_pipeline.run.run import Pipeline

__all__ = [
    "PRECISIONS",
    "Answers",
    "CheckpointHooks",
    "OptimizersOnDemand",
    "Pipeline",
    "Prospect",
    "check_run",
]
