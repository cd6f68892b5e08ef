"""The command line: `lightning-pipeline plan` and `lightning-pipeline checkpoint`."""

from lightning_pipeline.commands.checkpoint import consolidate, inspect, verify_folder
from lightning_pipeline.commands.plan import plan

__all__ = ["consolidate", "inspect", "plan", "verify_folder"]
