"""Builds a module without weights, and then the weights that are asked for, as one device would."""

from lightning_pipeline.model.construction.construction import (
    Construction,
    is_whole,
    sizes_of,
    without_weights,
)
from lightning_pipeline.model.construction.places import named_states, replace
from lightning_pipeline.model.construction.recorder import Recorder

__all__ = ["Construction", "Recorder", "is_whole", "named_states", "replace", "sizes_of", "without_weights"]
