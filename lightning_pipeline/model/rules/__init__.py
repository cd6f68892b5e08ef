"""How what micro-batches leave behind becomes what the batch leaves, and how that is found out."""

from lightning_pipeline.model.rules.gathered import Gathered, at_end, values_at_end
from lightning_pipeline.model.rules.made_up import (
    LARGEST,
    MadeUp,
    Observed,
    Outputs,
    bytes_of,
    dimension_of,
    joined_values,
    made_up,
    made_up_values,
    values_in,
)
from lightning_pipeline.model.rules.probe import Rules, rules_of
from lightning_pipeline.model.rules.rows import Rows, StartRows, rows_by_shape
from lightning_pipeline.model.rules.rules import largest, same, smallest, summed, unmerged, usual
from lightning_pipeline.model.rules.runs import Question, Runs
from lightning_pipeline.model.rules.trial import CHAINED, Merge, NoFit, Rule
from lightning_pipeline.model.rules.values import equal, own_containers

__all__ = [
    "CHAINED",
    "LARGEST",
    "Gathered",
    "MadeUp",
    "Merge",
    "NoFit",
    "Observed",
    "Outputs",
    "Question",
    "Rows",
    "Rule",
    "Rules",
    "Runs",
    "StartRows",
    "at_end",
    "bytes_of",
    "dimension_of",
    "equal",
    "joined_values",
    "largest",
    "made_up",
    "made_up_values",
    "own_containers",
    "rows_by_shape",
    "rules_of",
    "same",
    "smallest",
    "summed",
    "unmerged",
    "usual",
    "values_at_end",
    "values_in",
]
