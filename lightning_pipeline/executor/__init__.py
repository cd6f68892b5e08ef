"""Runs a rank's plan: one loop, and a table from kind of action to method."""

from lightning_pipeline.executor.executor import Executor

__all__ = ["Executor"]
