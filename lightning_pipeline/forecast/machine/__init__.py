"""Devices and the links between them: data sheets, what is assumed, what is measured."""

from lightning_pipeline.forecast.machine.assumptions import (
    BANDWIDTH_SHARE,
    DEFAULT_COPIES,
    EFFICIENCY,
    SPLIT_SURPLUS,
    Assumptions,
)
from lightning_pipeline.forecast.machine.devices import DEVICES, Device, device_named, known_device
from lightning_pipeline.forecast.machine.link import measure_link

__all__ = [
    "BANDWIDTH_SHARE",
    "DEFAULT_COPIES",
    "DEVICES",
    "EFFICIENCY",
    "SPLIT_SURPLUS",
    "Assumptions",
    "Device",
    "device_named",
    "known_device",
    "measure_link",
]
