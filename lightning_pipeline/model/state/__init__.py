"""What of the module lives on this rank, and what a step leaves behind."""

from lightning_pipeline.model.state.elsewhere import AttributeGuards, Elsewhere, ElsewhereError
from lightning_pipeline.model.state.in_units import InUnits, Told, values_kept
from lightning_pipeline.model.state.late import late_values, put_late_values
from lightning_pipeline.model.state.made_up import MadeUp, dimension_of, joined_values, made_up
from lightning_pipeline.model.state.meeting import Meeting, Sources
from lightning_pipeline.model.state.outside import Apart, CannotRepeatError
from lightning_pipeline.model.state.parameters import SharedParameter, StageParameters
from lightning_pipeline.model.state.probe import Question, Rules, rules_of
from lightning_pipeline.model.state.rules import (
    Merge,
    Rows,
    Rule,
    Trial,
    equal,
    goes_on,
    rows_of_each,
    rule_for,
    same,
    summed,
    unmerged,
    usual,
)
from lightning_pipeline.model.state.sent import FromLast, Gradients, Sent, left_in, put_in
from lightning_pipeline.model.state.start_rows import Pieces, StartRows, rows_by_shape
from lightning_pipeline.model.state.step_state import (
    CHAINED,
    AsOne,
    StepState,
    is_absent,
    is_told_as_attribute,
    own_containers,
)

__all__ = [
    "CHAINED",
    "Apart",
    "AsOne",
    "AttributeGuards",
    "CannotRepeatError",
    "Elsewhere",
    "ElsewhereError",
    "FromLast",
    "Gradients",
    "InUnits",
    "MadeUp",
    "Meeting",
    "Merge",
    "Pieces",
    "Question",
    "Rows",
    "Rule",
    "Rules",
    "Sent",
    "SharedParameter",
    "Sources",
    "StageParameters",
    "StartRows",
    "StepState",
    "Told",
    "Trial",
    "dimension_of",
    "equal",
    "goes_on",
    "is_absent",
    "is_told_as_attribute",
    "joined_values",
    "late_values",
    "left_in",
    "made_up",
    "own_containers",
    "put_in",
    "put_late_values",
    "rows_by_shape",
    "rows_of_each",
    "rule_for",
    "rules_of",
    "same",
    "summed",
    "unmerged",
    "usual",
    "values_kept",
]
