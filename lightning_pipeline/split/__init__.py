"""The unmodified module: units, trace, liveness, partition, replay."""

from lightning_pipeline.split.elsewhere import ElsewhereError
from lightning_pipeline.split.foreseen import (
    StageActivations,
    peak_activations,
    stage_activations,
)
from lightning_pipeline.split.late import late_values, put_late_values
from lightning_pipeline.split.model import SplitModel, StepResult
from lightning_pipeline.split.partition import Partition, partition
from lightning_pipeline.split.placeholder import is_placeholder, named_function, user_line
from lightning_pipeline.split.residence import SharedParameter
from lightning_pipeline.split.saved import Held, Peaks, SavedCount, storage_bytes
from lightning_pipeline.split.structure import tensors_in
from lightning_pipeline.split.table import StageRow, StageTable, size_text, text_table
from lightning_pipeline.split.trace import Trace, trace_step
from lightning_pipeline.split.units import Unit, find_units

__all__ = [
    "ElsewhereError",
    "Held",
    "Partition",
    "Peaks",
    "SavedCount",
    "SharedParameter",
    "SplitModel",
    "StageActivations",
    "StageRow",
    "StageTable",
    "StepResult",
    "Trace",
    "Unit",
    "find_units",
    "is_placeholder",
    "late_values",
    "named_function",
    "partition",
    "peak_activations",
    "put_late_values",
    "size_text",
    "stage_activations",
    "storage_bytes",
    "tensors_in",
    "text_table",
    "trace_step",
    "user_line",
]
