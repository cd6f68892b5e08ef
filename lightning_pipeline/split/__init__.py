"""The unmodified module: units, trace, liveness, partition, replay."""

from lightning_pipeline.split.elsewhere import ElsewhereError
from lightning_pipeline.split.model import SplitModel, StepResult
from lightning_pipeline.split.partition import Partition, partition
from lightning_pipeline.split.residence import SharedParameter
from lightning_pipeline.split.table import StageRow, StageTable
from lightning_pipeline.split.trace import Trace, trace_step
from lightning_pipeline.split.units import Unit, find_units

__all__ = [
    "ElsewhereError",
    "Partition",
    "SharedParameter",
    "SplitModel",
    "StageRow",
    "StageTable",
    "StepResult",
    "Trace",
    "Unit",
    "find_units",
    "partition",
    "trace_step",
]
