"""Bytes between neighbouring ranks."""

from lightning_pipeline.wire.channel import Channel
from lightning_pipeline.wire.edge import Edge
from lightning_pipeline.wire.header import BACKWARD, FORWARD
from lightning_pipeline.wire.inbox import Key, Opening
from lightning_pipeline.wire.link import Link, LinkError
from lightning_pipeline.wire.stage import Stage, Values
from lightning_pipeline.wire.waits import Wait, Waits

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Channel",
    "Edge",
    "Key",
    "Link",
    "LinkError",
    "Opening",
    "Stage",
    "Values",
    "Wait",
    "Waits",
]
