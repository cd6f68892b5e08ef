"""What a pipeline would do and need, and what would make it faster. No Lightning here."""

from lightning_pipeline.forecast.candidates import name_of, named_schedules, split_factor, tried_schedules
from lightning_pipeline.forecast.machine import (
    DEVICES,
    Assumptions,
    Device,
    device_named,
    known_device,
    measure_link,
)
from lightning_pipeline.forecast.outcome import Forecast, forecast
from lightning_pipeline.forecast.rates import Rates, rates, tokens_of
from lightning_pipeline.forecast.scaled import ScaledWorkload
from lightning_pipeline.forecast.search import Search, search
from lightning_pipeline.forecast.sweep import sweep
from lightning_pipeline.forecast.texts import operations_text
from lightning_pipeline.forecast.unit_times import MeasuredWorkload
from lightning_pipeline.forecast.workload import Workload

__all__ = [
    "DEVICES",
    "Assumptions",
    "Device",
    "Forecast",
    "MeasuredWorkload",
    "Rates",
    "ScaledWorkload",
    "Search",
    "Workload",
    "device_named",
    "forecast",
    "known_device",
    "measure_link",
    "name_of",
    "named_schedules",
    "operations_text",
    "rates",
    "search",
    "split_factor",
    "sweep",
    "tokens_of",
    "tried_schedules",
]
