"""From a whole LightningModule to this rank's stages, and back to the whole one."""

from lightning_pipeline.run.setup.checks import check_run, compare_modules, compare_optimizers, compare_runs
from lightning_pipeline.run.setup.cut import Cut, Cutting, materialize
from lightning_pipeline.run.setup.forwards import around_forwards, told_of_no_group
from lightning_pipeline.run.setup.headline import batch_statistics, headline, runs_whole, steered, too_small
from lightning_pipeline.run.setup.lazy import FirstCall, lazy_layers, make_lazy_layers
from lightning_pipeline.run.setup.summary import summarize_before_split
from lightning_pipeline.run.setup.trainer import (
    LoaderHook,
    beside_module,
    hooks_undone,
    loaders_undone,
    loggers_set_aside,
    seed_of_run,
    stream_undone,
)
from lightning_pipeline.run.setup.whole import (
    equal_buffers,
    held_states,
    kept_by_units,
    listed_states,
    make_whole,
    move,
    start_equal,
)

__all__ = [
    "Cut",
    "Cutting",
    "FirstCall",
    "LoaderHook",
    "around_forwards",
    "batch_statistics",
    "beside_module",
    "check_run",
    "compare_modules",
    "compare_optimizers",
    "compare_runs",
    "equal_buffers",
    "headline",
    "held_states",
    "hooks_undone",
    "kept_by_units",
    "lazy_layers",
    "listed_states",
    "loaders_undone",
    "loggers_set_aside",
    "make_lazy_layers",
    "make_whole",
    "materialize",
    "move",
    "runs_whole",
    "seed_of_run",
    "start_equal",
    "steered",
    "stream_undone",
    "summarize_before_split",
    "told_of_no_group",
    "too_small",
]
