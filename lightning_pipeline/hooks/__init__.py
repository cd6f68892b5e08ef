"""What the user's hooks see of a module that is spread over stages."""

from lightning_pipeline.hooks.beside import owners_beside
from lightning_pipeline.hooks.configure import configure
from lightning_pipeline.hooks.epoch_end import EpochEndHooks
from lightning_pipeline.hooks.gradients import SetAside, zeroed_unseen
from lightning_pipeline.hooks.group_guard import GroupGuard
from lightning_pipeline.hooks.hook_logs import HookLogs
from lightning_pipeline.hooks.metrics import SharedMetrics
from lightning_pipeline.hooks.nonfinite import AgreedGradients, FiniteSteps, first_not_finite
from lightning_pipeline.hooks.norms import GlobalNorms
from lightning_pipeline.hooks.optimizers import called_once
from lightning_pipeline.hooks.precision import clip_to_norm, global_norm, join_scaler, with_global_norm
from lightning_pipeline.hooks.step_logs import LogRecorder, Report, ReportChannel, loss_of, replay

__all__ = [
    "AgreedGradients",
    "EpochEndHooks",
    "FiniteSteps",
    "GlobalNorms",
    "GroupGuard",
    "HookLogs",
    "LogRecorder",
    "Report",
    "ReportChannel",
    "SetAside",
    "SharedMetrics",
    "called_once",
    "clip_to_norm",
    "configure",
    "first_not_finite",
    "global_norm",
    "join_scaler",
    "loss_of",
    "owners_beside",
    "replay",
    "with_global_norm",
    "zeroed_unseen",
]
