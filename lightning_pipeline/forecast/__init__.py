"""What a pipeline would do and need, and what would make it faster. No Lightning here."""

from lightning_pipeline.forecast.machine import (
    DEVICES,
    Assumptions,
    device_named,
    known_device,
    measure_link,
)
from lightning_pipeline.forecast.outcome import Forecast, forecast
from lightning_pipeline.forecast.search import Search, search
from lightning_pipeline.forecast.sweep import sweep
from lightning_pipeline.forecast.workload import (
    MeasuredWorkload,
    ScaledWorkload,
    Workload,
    name_of,
    named_schedules,
    operations_text,
    rates,
    split_factor,
    tokens_of,
    tried_schedules,
)

__all__ = [
    "DEVICES",
    "Assumptions",
    "Forecast",
    "MeasuredWorkload",
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
