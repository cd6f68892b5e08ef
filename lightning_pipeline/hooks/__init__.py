"""What the user's hooks see of a module that is spread over stages."""

from lightning_pipeline.hooks.beside import Beside, objects_beside, owners_at_end
from lightning_pipeline.hooks.epoch_end import EpochEndHooks, tell_of_units, units_at_end
from lightning_pipeline.hooks.gradients import GradientHooks, HooksElsewhere, SetAside, zeroed_unseen
from lightning_pipeline.hooks.hook_logs import HookLogs
from lightning_pipeline.hooks.lockstep import LockSteps, Reads, UncutBatch
from lightning_pipeline.hooks.loggers import StepWrites, Write, complete_in_loggers
from lightning_pipeline.hooks.metrics import SharedMetrics
from lightning_pipeline.hooks.nonfinite import AgreedGradients, FiniteSteps, first_not_finite
from lightning_pipeline.hooks.optimizers import (
    Calls,
    OwnParts,
    exchange,
    give_gradients,
    give_states,
    gradients_of,
    is_torchs,
    refuse_strangers,
    refuse_unserved,
    states_of,
    watch_steps,
)
from lightning_pipeline.hooks.precision import join_scaler, of_stages
from lightning_pipeline.hooks.remote_units import RemoteUnits, answer_calls
from lightning_pipeline.hooks.reports import Entry, Report, ReportChannel, loss_of, replay
from lightning_pipeline.hooks.step_logs import LogRecorder, own_logs_shown

__all__ = [
    "AgreedGradients",
    "Beside",
    "Calls",
    "Entry",
    "EpochEndHooks",
    "FiniteSteps",
    "GradientHooks",
    "HookLogs",
    "HooksElsewhere",
    "LockSteps",
    "LogRecorder",
    "OwnParts",
    "Reads",
    "RemoteUnits",
    "Report",
    "ReportChannel",
    "SetAside",
    "SharedMetrics",
    "StepWrites",
    "UncutBatch",
    "Write",
    "answer_calls",
    "complete_in_loggers",
    "exchange",
    "first_not_finite",
    "give_gradients",
    "give_states",
    "gradients_of",
    "is_torchs",
    "join_scaler",
    "loss_of",
    "objects_beside",
    "of_stages",
    "own_logs_shown",
    "owners_at_end",
    "refuse_strangers",
    "refuse_unserved",
    "replay",
    "states_of",
    "tell_of_units",
    "units_at_end",
    "watch_steps",
    "zeroed_unseen",
]
