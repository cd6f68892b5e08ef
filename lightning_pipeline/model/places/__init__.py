"""Where a step may leave something behind, what stood there, and what has changed."""

from lightning_pipeline.model.places.findings import Findings
from lightning_pipeline.model.places.kept import exchange_kept
from lightning_pipeline.model.places.owners import (
    FILLED,
    MISSING,
    ArrayOwner,
    ClassOwner,
    Effect,
    FileOwner,
    Flags,
    FoundOwner,
    GradMode,
    Guard,
    Memory,
    Numbers,
    Owner,
    Place,
    Replayed,
    TensorOwner,
)
from lightning_pipeline.model.places.reach import Changes, Reach, give_values, has_values, values_of
from lightning_pipeline.model.places.standing import (
    Kept,
    Standing,
    Surroundings,
)

__all__ = [
    "FILLED",
    "MISSING",
    "ArrayOwner",
    "Changes",
    "ClassOwner",
    "Effect",
    "FileOwner",
    "Findings",
    "Flags",
    "FoundOwner",
    "GradMode",
    "Guard",
    "Kept",
    "Memory",
    "Numbers",
    "Owner",
    "Place",
    "Reach",
    "Replayed",
    "Standing",
    "Surroundings",
    "TensorOwner",
    "exchange_kept",
    "give_values",
    "has_values",
    "values_of",
]
