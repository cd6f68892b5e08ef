"""Checkpoints: folders written by all ranks through DCP, committed by renaming, and safe to open."""
