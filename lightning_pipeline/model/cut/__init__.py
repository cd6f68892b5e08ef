"""Where the module is cut, and what crosses each cut."""

from lightning_pipeline.model.cut.activations import StageActivations, peak_activations, stage_activations
from lightning_pipeline.model.cut.advice import too_large
from lightning_pipeline.model.cut.circles import opened
from lightning_pipeline.model.cut.growth import ModuleTree
from lightning_pipeline.model.cut.partitioning import Partition, misfit, partition, unit_costs, value_sizes
from lightning_pipeline.model.cut.reads import Reads
from lightning_pipeline.model.cut.table import (
    StageRow,
    StageTable,
    common_prefix,
    size_text,
    text_table,
    units_text,
)
from lightning_pipeline.model.cut.trials import Trials
from lightning_pipeline.model.cut.ways import (
    NO_CALLS,
    Calls,
    Liveness,
    Microbatch,
    Route,
    StageDone,
    StepRoutes,
    TracedOutput,
    TracedOutputs,
    UnclearSizesError,
    ValueKey,
    backward_edges,
    called_otherwise,
    check_ways,
    goes_on,
    liveness_of,
    stages_of_states,
    states_by_stage,
)

__all__ = [
    "NO_CALLS",
    "Calls",
    "Liveness",
    "Microbatch",
    "ModuleTree",
    "Partition",
    "Reads",
    "Route",
    "StageActivations",
    "StageDone",
    "StageRow",
    "StageTable",
    "StepRoutes",
    "TracedOutput",
    "TracedOutputs",
    "Trials",
    "UnclearSizesError",
    "ValueKey",
    "backward_edges",
    "called_otherwise",
    "check_ways",
    "common_prefix",
    "goes_on",
    "liveness_of",
    "misfit",
    "opened",
    "partition",
    "peak_activations",
    "size_text",
    "stage_activations",
    "stages_of_states",
    "states_by_stage",
    "text_table",
    "too_large",
    "unit_costs",
    "units_text",
    "value_sizes",
]
