"""Checkpoints: folders written by all ranks through DCP, committed by renaming, and safe to open."""

from lightning_pipeline.checkpoint.after_run import save_whole
from lightning_pipeline.checkpoint.consolidate import read_whole, to_file, to_safetensors, verify
from lightning_pipeline.checkpoint.run import Checkpoints, Holdings, options_of

__all__ = [
    "Checkpoints",
    "Holdings",
    "options_of",
    "read_whole",
    "save_whole",
    "to_file",
    "to_safetensors",
    "verify",
]
