"""What the user's hooks see of a module that is spread over stages."""

from lightning_pipeline.hooks.copies import fill_copies
from lightning_pipeline.hooks.epoch_end import EpochEndHooks
from lightning_pipeline.hooks.gradients import SetAside, zeroed_unseen
from lightning_pipeline.hooks.hook_logs import HookLogs
from lightning_pipeline.hooks.metrics import SharedMetrics
from lightning_pipeline.hooks.optimizers import OwnParts, called_once, exchange, is_torchs, refuse_unserved
from lightning_pipeline.hooks.precision import clip_to_norm, global_norm, with_global_norm
from lightning_pipeline.hooks.step_lists import StepLists
from lightning_pipeline.hooks.step_logs import LogRecorder, Report, ReportChannel, loss_of, replay

__all__ = [
    "EpochEndHooks",
    "HookLogs",
    "LogRecorder",
    "OwnParts",
    "Report",
    "ReportChannel",
    "SetAside",
    "SharedMetrics",
    "StepLists",
    "called_once",
    "clip_to_norm",
    "exchange",
    "fill_copies",
    "global_norm",
    "is_torchs",
    "loss_of",
    "refuse_unserved",
    "replay",
    "with_global_norm",
    "zeroed_unseen",
]
