"""What a traced module does and needs: operations, bytes, seconds of its units and stages."""

from lightning_pipeline.forecast.workload.candidates import (
    name_of,
    named_schedules,
    split_factor,
    strategy_text,
    tried_schedules,
)
from lightning_pipeline.forecast.workload.memory import PredictedMemory, alone, memory_of
from lightning_pipeline.forecast.workload.profile import StageProfile
from lightning_pipeline.forecast.workload.rates import Rates, rates, tokens_of
from lightning_pipeline.forecast.workload.scaled import ScaledWorkload
from lightning_pipeline.forecast.workload.texts import (
    basis_text,
    number_text,
    operations_text,
    seconds_text,
    write_csv,
)
from lightning_pipeline.forecast.workload.times import StageTimes
from lightning_pipeline.forecast.workload.unit_times import MeasuredWorkload
from lightning_pipeline.forecast.workload.workload import Workload

__all__ = [
    "MeasuredWorkload",
    "PredictedMemory",
    "Rates",
    "ScaledWorkload",
    "StageProfile",
    "StageTimes",
    "Workload",
    "alone",
    "basis_text",
    "memory_of",
    "name_of",
    "named_schedules",
    "number_text",
    "operations_text",
    "rates",
    "seconds_text",
    "split_factor",
    "strategy_text",
    "tokens_of",
    "tried_schedules",
    "write_csv",
]
