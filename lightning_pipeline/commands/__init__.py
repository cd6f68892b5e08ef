"""The command line: `lightning-pipeline plan` and `lightning-pipeline checkpoint`."""

from lightning_pipeline.commands.checkpoint import checkpoint
from lightning_pipeline.commands.plan import plan

__all__ = ["checkpoint", "plan"]
