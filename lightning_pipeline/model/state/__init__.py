"""What of the module lives on this rank, and what a step leaves behind."""

from lightning_pipeline.model.state.elsewhere import (
    AttributeGuards,
    Elsewhere,
    ElsewhereError,
    Unmerged,
    Unsent,
)
from lightning_pipeline.model.state.in_units import InUnits, Told, values_kept
from lightning_pipeline.model.state.late import late_values, put_late_values
from lightning_pipeline.model.state.meeting import Meeting
from lightning_pipeline.model.state.outside import Apart, CannotRepeatError
from lightning_pipeline.model.state.parameters import SharedParameter, StageParameters
from lightning_pipeline.model.state.sent import FromLast, Gradients, Sent, is_small, left_in, put_in
from lightning_pipeline.model.state.sources import Sources
from lightning_pipeline.model.state.step_state import AsOne, StepState, is_absent, is_told_as_attribute
from lightning_pipeline.model.state.unit_buffers import BufferStarts

__all__ = [
    "Apart",
    "AsOne",
    "AttributeGuards",
    "BufferStarts",
    "CannotRepeatError",
    "Elsewhere",
    "ElsewhereError",
    "FromLast",
    "Gradients",
    "InUnits",
    "Meeting",
    "Sent",
    "SharedParameter",
    "Sources",
    "StageParameters",
    "StepState",
    "Told",
    "Unmerged",
    "Unsent",
    "is_absent",
    "is_small",
    "is_told_as_attribute",
    "late_values",
    "left_in",
    "put_in",
    "put_late_values",
    "values_kept",
]
