"""What of the module lives on this rank, and what a step leaves behind."""

from lightning_pipeline.model.state.elsewhere import AttributeGuards, Elsewhere, ElsewhereError
from lightning_pipeline.model.state.isolation import Isolation
from lightning_pipeline.model.state.kept import Kept
from lightning_pipeline.model.state.late import late_values, put_late_values
from lightning_pipeline.model.state.meeting import Meeting, Sources
from lightning_pipeline.model.state.parameters import Residence, SharedParameter

__all__ = [
    "AttributeGuards",
    "Elsewhere",
    "ElsewhereError",
    "Isolation",
    "Kept",
    "Meeting",
    "Residence",
    "SharedParameter",
    "Sources",
    "late_values",
    "put_late_values",
]
