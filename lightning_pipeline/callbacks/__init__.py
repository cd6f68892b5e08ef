"""What the user sees of a run."""

from lightning_pipeline.callbacks.bubble import BubbleMonitor
from lightning_pipeline.callbacks.memory import StageMemoryMonitor
from lightning_pipeline.callbacks.timeline import PipelineTimeline

__all__ = ["BubbleMonitor", "PipelineTimeline", "StageMemoryMonitor"]
