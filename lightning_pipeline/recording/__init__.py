"""When actions and messages began and ended, on one clock."""

from lightning_pipeline.recording.clock import Mark, now, stream_clock
from lightning_pipeline.recording.timeline import (
    Event,
    Message,
    MessageLog,
    OpenRecording,
    Recording,
    Timeline,
)

__all__ = [
    "Event",
    "Mark",
    "Message",
    "MessageLog",
    "OpenRecording",
    "Recording",
    "Timeline",
    "now",
    "stream_clock",
]
