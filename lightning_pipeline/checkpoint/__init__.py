"""Checkpoints: folders written by all ranks through DCP, committed by renaming, and safe to open."""

from lightning_pipeline.checkpoint.after_run import first_holders, outside_a_run, save_whole
from lightning_pipeline.checkpoint.consolidate import read_whole, to_file, to_safetensors, verify
from lightning_pipeline.checkpoint.newest import newest_verified
from lightning_pipeline.checkpoint.one_file import Put, load_from_checkpoint, make_folders_known
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.checkpoint.run import Checkpoints, Holdings, checkpoint_options, writes_one_file
from lightning_pipeline.checkpoint.save import Part, write

__all__ = [
    "Checkpoints",
    "Holdings",
    "Part",
    "Put",
    "Ranks",
    "checkpoint_options",
    "first_holders",
    "load_from_checkpoint",
    "make_folders_known",
    "newest_verified",
    "outside_a_run",
    "read_whole",
    "save_whole",
    "to_file",
    "to_safetensors",
    "verify",
    "write",
    "writes_one_file",
]
