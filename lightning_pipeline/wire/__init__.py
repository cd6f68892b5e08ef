"""Bytes between neighbouring ranks."""

from lightning_pipeline.wire.channel import Channel
from lightning_pipeline.wire.copies import SHARING, Copies
from lightning_pipeline.wire.edge import Communicators, Edge
from lightning_pipeline.wire.header import BACKWARD, FORWARD
from lightning_pipeline.wire.inbox import Key, Opening
from lightning_pipeline.wire.link import Link, LinkError
from lightning_pipeline.wire.packing import Layout, TensorSpec
from lightning_pipeline.wire.stage import Stage, Values
from lightning_pipeline.wire.waits import Wait, Waits

__all__ = [
    "BACKWARD",
    "FORWARD",
    "SHARING",
    "Channel",
    "Communicators",
    "Copies",
    "Edge",
    "Key",
    "Layout",
    "Link",
    "LinkError",
    "Opening",
    "Stage",
    "TensorSpec",
    "Values",
    "Wait",
    "Waits",
]
