"""One step of the whole module, run once without its work, and what was seen."""

from lightning_pipeline.model.trace.checkpointing import reentrant_checkpoint_replaced
from lightning_pipeline.model.trace.choices import plain_leaves, plain_state
from lightning_pipeline.model.trace.costs import FLOPS_PER_BYTE, Work
from lightning_pipeline.model.trace.patches import (
    BackwardHooks,
    Runner,
    Stand,
    UnitPatches,
    has_backward_hooks,
)
from lightning_pipeline.model.trace.places import (
    MISSING,
    ClassOwner,
    Effect,
    FoundOwner,
    Guard,
    Kept,
    Owner,
    Place,
    Replayed,
    Standing,
    Surroundings,
    TensorOwner,
    tensors_held,
)
from lightning_pipeline.model.trace.ports import PortSpec, Transient, Watch
from lightning_pipeline.model.trace.record import Call, Trace, step_function, untraced
from lightning_pipeline.model.trace.sinks import (
    around_metrics,
    metrics_of,
    named_metrics,
    stub_metrics,
    stub_sinks,
)
from lightning_pipeline.model.trace.tracer import trace_step
from lightning_pipeline.model.trace.units import find_units, finer_names

__all__ = [
    "FLOPS_PER_BYTE",
    "MISSING",
    "BackwardHooks",
    "Call",
    "ClassOwner",
    "Effect",
    "FoundOwner",
    "Guard",
    "Kept",
    "Owner",
    "Place",
    "PortSpec",
    "Replayed",
    "Runner",
    "Stand",
    "Standing",
    "Surroundings",
    "TensorOwner",
    "Trace",
    "Transient",
    "UnitPatches",
    "Watch",
    "Work",
    "around_metrics",
    "find_units",
    "finer_names",
    "has_backward_hooks",
    "metrics_of",
    "named_metrics",
    "plain_leaves",
    "plain_state",
    "reentrant_checkpoint_replaced",
    "step_function",
    "stub_metrics",
    "stub_sinks",
    "tensors_held",
    "trace_step",
    "untraced",
]
