"""Tensors that are not here: specs, placeholders, tags, and nested values that hold them."""

from lightning_pipeline.model.tensors.cache import PlaceholderCache, result_dtypes
from lightning_pipeline.model.tensors.code import Code, code_of
from lightning_pipeline.model.tensors.containers import (
    are_the_users,
    attributes_of,
    contents_of,
    filled_by,
    items_of,
    objects_below,
    refill,
)
from lightning_pipeline.model.tensors.given import Given, takes_containers
from lightning_pipeline.model.tensors.operations import (
    SET_DATA,
    FormSeen,
    WritesSeen,
    WritesUndone,
    data_set_without_values,
    is_placeholder,
    operands_of,
    standing_tensors,
    storage_key,
    written_tensors,
)
from lightning_pipeline.model.tensors.placeholder import PlaceholderMode, alias
from lightning_pipeline.model.tensors.restore import (
    ModuleState,
    ObjectState,
    forget_placeholders,
)
from lightning_pipeline.model.tensors.saved import (
    Held,
    Peaks,
    SavedCount,
    copied_at_end,
    selective_checkpoints,
    stepping_aside,
    storage_bytes,
    top_hooks,
)
from lightning_pipeline.model.tensors.shape_rules import (
    Sizes,
    TensorSpec,
    by_shape_alone,
    chosen_by,
    fitted,
    of_most,
    sizes_between,
)
from lightning_pipeline.model.tensors.stand_ins import StandIns, weights_needed
from lightning_pipeline.model.tensors.structure import (
    NOTHING,
    Structure,
    describe,
    flatten,
    leaves_in,
    map_leaves,
    map_tensors,
    tensors_in,
    unflatten,
)
from lightning_pipeline.model.tensors.tags import SharedMemory, Tag, TagStore, is_changed
from lightning_pipeline.model.tensors.taint import Taint
from lightning_pipeline.model.tensors.user_code import user_line

__all__ = [
    "NOTHING",
    "SET_DATA",
    "Code",
    "FormSeen",
    "Given",
    "Held",
    "ModuleState",
    "ObjectState",
    "Peaks",
    "PlaceholderCache",
    "PlaceholderMode",
    "SavedCount",
    "SharedMemory",
    "Sizes",
    "StandIns",
    "Structure",
    "Tag",
    "TagStore",
    "Taint",
    "TensorSpec",
    "WritesSeen",
    "WritesUndone",
    "alias",
    "are_the_users",
    "attributes_of",
    "by_shape_alone",
    "chosen_by",
    "code_of",
    "contents_of",
    "copied_at_end",
    "data_set_without_values",
    "describe",
    "filled_by",
    "fitted",
    "flatten",
    "forget_placeholders",
    "is_changed",
    "is_placeholder",
    "items_of",
    "leaves_in",
    "map_leaves",
    "map_tensors",
    "objects_below",
    "of_most",
    "operands_of",
    "refill",
    "result_dtypes",
    "selective_checkpoints",
    "sizes_between",
    "standing_tensors",
    "stepping_aside",
    "storage_bytes",
    "storage_key",
    "takes_containers",
    "tensors_in",
    "top_hooks",
    "unflatten",
    "user_line",
    "weights_needed",
    "written_tensors",
]
