"""Checkpoints: folders written by all ranks through DCP, committed by renaming, and safe to open."""

import lightning.pytorch  # noqa: F401  # first: its import makes the strategy known, which needs what is here
