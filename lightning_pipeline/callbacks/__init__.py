"""What the user sees of a run."""

from lightning_pipeline.callbacks.bubble import BubbleMonitor
from lightning_pipeline.callbacks.memory import StageMemoryMonitor

__all__ = ["BubbleMonitor", "StageMemoryMonitor"]
