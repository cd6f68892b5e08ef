"""One run of a Trainer: from setup to teardown, and one batch in it."""

from lightning_pipeline.run.answers import Answers
from lightning_pipeline.run.checkpoints import CheckpointHooks
from lightning_pipeline.run.forecasting import PRECISIONS, ForecastInput
from lightning_pipeline.run.members import join, stay_away
from lightning_pipeline.run.on_demand import OptimizersOnDemand
from lightning_pipeline.run.one_device import pipelined
from lightning_pipeline.run.run import Pipeline
from lightning_pipeline.run.setup import (
    check_run,
    compare_modules,
    compare_optimizers,
    compare_runs,
    loggers_set_aside,
)
from lightning_pipeline.run.start import Splitting, begin

__all__ = [
    "PRECISIONS",
    "Answers",
    "CheckpointHooks",
    "ForecastInput",
    "OptimizersOnDemand",
    "Pipeline",
    "Splitting",
    "begin",
    "check_run",
    "compare_modules",
    "compare_optimizers",
    "compare_runs",
    "join",
    "loggers_set_aside",
    "pipelined",
    "stay_away",
]
