"""What a pipeline would do and need, and what would make it faster. No Lightning here."""

from lightning_pipeline.forecast.assumptions import Assumptions
from lightning_pipeline.forecast.candidates import name_of, named_schedules, split_factor, tried_schedules
from lightning_pipeline.forecast.link import measure_link
from lightning_pipeline.forecast.outcome import Forecast, forecast
from lightning_pipeline.forecast.sweep import sweep
from lightning_pipeline.forecast.unit_times import MeasuredWorkload
from lightning_pipeline.forecast.workload import Workload

__all__ = [
    "Assumptions",
    "Forecast",
    "MeasuredWorkload",
    "Workload",
    "forecast",
    "measure_link",
    "name_of",
    "named_schedules",
    "split_factor",
    "sweep",
    "tried_schedules",
]
