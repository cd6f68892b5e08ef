"""How what micro-batches leave behind becomes what the batch leaves, and how that is found out."""

from lightning_pipeline.model.rules.gathered import Gathered, Outputs, at_end, values_at_end
from lightning_pipeline.model.rules.made_up import MadeUp, dimension_of, joined_values, made_up
from lightning_pipeline.model.rules.probe import Rules, rules_of
from lightning_pipeline.model.rules.rows import Rows, StartRows, rows_by_shape
from lightning_pipeline.model.rules.rules import same, summed, unmerged, usual
from lightning_pipeline.model.rules.runs import Question, Runs
from lightning_pipeline.model.rules.trial import CHAINED, Merge, NoFit, Rule
from lightning_pipeline.model.rules.values import equal, own_containers

__all__ = [
    "CHAINED",
    "Gathered",
    "MadeUp",
    "Merge",
    "NoFit",
    "Outputs",
    "Question",
    "Rows",
    "Rule",
    "Rules",
    "Runs",
    "StartRows",
    "at_end",
    "dimension_of",
    "equal",
    "joined_values",
    "made_up",
    "own_containers",
    "rows_by_shape",
    "rules_of",
    "same",
    "summed",
    "unmerged",
    "usual",
    "values_at_end",
]
