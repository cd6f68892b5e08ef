"""What did happen in a run: time, bubble, memory and messages of the steps that were recorded."""

from lightning_pipeline.measure.batches import BatchClock
from lightning_pipeline.measure.exchange import Exchange, Gathered
from lightning_pipeline.measure.measurement import Measurement
from lightning_pipeline.measure.memory import (
    HeldStages,
    MeasuredMemory,
    MemoryMeter,
    StageMemory,
    numbers_in,
    with_numbers,
)
from lightning_pipeline.measure.meter import Meter
from lightning_pipeline.measure.perfetto import trace
from lightning_pipeline.measure.pipeline_run import PipelineRun, run_of, stage_names
from lightning_pipeline.measure.report import Report
from lightning_pipeline.measure.steps import RankStep, gather_step
from lightning_pipeline.measure.timelines import Comparison
from lightning_pipeline.measure.whole_meter import WholeMeter

__all__ = [
    "BatchClock",
    "Comparison",
    "Exchange",
    "Gathered",
    "HeldStages",
    "MeasuredMemory",
    "Measurement",
    "MemoryMeter",
    "Meter",
    "PipelineRun",
    "RankStep",
    "Report",
    "StageMemory",
    "WholeMeter",
    "gather_step",
    "numbers_in",
    "run_of",
    "stage_names",
    "trace",
    "with_numbers",
]
