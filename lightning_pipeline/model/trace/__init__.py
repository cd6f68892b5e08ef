"""One step of the whole module, run once without its work, and what was seen."""

from lightning_pipeline.model.trace.checkpointing import reentrant_checkpoint_replaced
from lightning_pipeline.model.trace.choices import (
    SCALAR_READS,
    Guesses,
    circumstances,
    is_tensor_read,
    makes_guard,
    numbers_beside,
    numbers_changed,
    other_answers,
    plain_leaves,
    plain_state,
    updates_of_metrics,
)
from lightning_pipeline.model.trace.glue import array_of
from lightning_pipeline.model.trace.patches import (
    BackwardHooks,
    Runner,
    Stand,
    UnitPatches,
    has_backward_hooks,
)
from lightning_pipeline.model.trace.ports import PortSpec, Transient, Watch
from lightning_pipeline.model.trace.record import (
    Call,
    Trace,
    inputs_of,
    note_told,
    step_function,
    turn_of,
    untraced,
)
from lightning_pipeline.model.trace.sinks import (
    ToldOnce,
    logged_in_run,
    note_logged,
    printed_once,
    silence,
    stub_sinks,
)
from lightning_pipeline.model.trace.tracing import trace_step
from lightning_pipeline.model.trace.units import Unit, find_new_units, find_units, finer_names

__all__ = [
    "SCALAR_READS",
    "BackwardHooks",
    "Call",
    "Guesses",
    "PortSpec",
    "Runner",
    "Stand",
    "ToldOnce",
    "Trace",
    "Transient",
    "Unit",
    "UnitPatches",
    "Watch",
    "array_of",
    "circumstances",
    "find_new_units",
    "find_units",
    "finer_names",
    "has_backward_hooks",
    "inputs_of",
    "is_tensor_read",
    "logged_in_run",
    "makes_guard",
    "note_logged",
    "note_told",
    "numbers_beside",
    "numbers_changed",
    "other_answers",
    "plain_leaves",
    "plain_state",
    "printed_once",
    "reentrant_checkpoint_replaced",
    "silence",
    "step_function",
    "stub_sinks",
    "trace_step",
    "turn_of",
    "untraced",
    "updates_of_metrics",
]
