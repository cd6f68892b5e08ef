"""Where a step may leave something behind, what stood there, and what has changed."""

from lightning_pipeline.model.places.findings import Findings
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
from lightning_pipeline.model.places.standing import (
    Kept,
    Standing,
    Surroundings,
)

__all__ = [
    "FILLED",
    "MISSING",
    "ArrayOwner",
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
    "Replayed",
    "Standing",
    "Surroundings",
    "TensorOwner",
]
