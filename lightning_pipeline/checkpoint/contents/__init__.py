"""What stands in a checkpoint. `checkpoint.run.Checkpoints._part` puts it together, on each rank its part.

Tensors, in DCP's shards of the folder (see `checkpoint.folder.names`), by key:

* `model`: parameters, buffers and extra state, by name; of tied ones the first name (`added`, `extra_state`);
* `optimizer_0`, ...: optimizer state by parameter name, for any number of stages (`optimizers`, `nested`).

The rest, in `meta.pt` (`meta_file`): what Lightning dumps of loops, callbacks, hyper-parameters, joined where
stages differ (`rank_differences`), without objects of classes that are no plain data (`objects`), and under
`lightning_pipeline`:

* `ranks`: parameter groups and LR-scheduler states, by pipeline rank (`groups`, `schedulers`);
* `replicas`: where each replica stands in its data and random numbers;
* `order`, `schedulers`: parameter names of the whole module, and the optimizer of each scheduler;
* `extra`: what modules keep that is no tensor; `objects`: what was set apart, pickled.

`lost` says whether it is all that the ranks hold, `fitting` whether it fits a module.
"""

from lightning_pipeline.checkpoint.contents.added import (
    added_to,
    contested,
    entries_of,
    held_here,
    replaced_in,
    writers_of,
)
from lightning_pipeline.checkpoint.contents.extra_state import (
    Owns,
    as_told,
    extra_names,
    extra_states,
    is_loaded_by_code,
    load_extra_states,
    owned_by,
)
from lightning_pipeline.checkpoint.contents.fitting import Misfits, StateEntries, compare
from lightning_pipeline.checkpoint.contents.groups import groups_of_file, whole_groups
from lightning_pipeline.checkpoint.contents.lost import kept_by_optimizers, refuse_losses
from lightning_pipeline.checkpoint.contents.meta_file import as_bytes
from lightning_pipeline.checkpoint.contents.objects import pickled, read_meta, set_apart, with_objects
from lightning_pipeline.checkpoint.contents.optimizer_edits import (
    Shown,
    given_states,
    put_edits,
    shown_states,
)
from lightning_pipeline.checkpoint.contents.optimizers import (
    bare,
    fill,
    flat_state,
    from_numbered,
    group_options,
    groups_of,
    misplaced,
    names_by_identity,
    names_of,
    on_host,
    shapes_of,
    to_numbered,
)
from lightning_pipeline.checkpoint.contents.rank_differences import at, different, joined, tensor_digests
from lightning_pipeline.checkpoint.contents.schedulers import as_read, schedulers_for, with_edits

__all__ = [
    "Misfits",
    "Owns",
    "Shown",
    "StateEntries",
    "added_to",
    "as_bytes",
    "as_read",
    "as_told",
    "at",
    "bare",
    "compare",
    "contested",
    "different",
    "entries_of",
    "extra_names",
    "extra_states",
    "fill",
    "flat_state",
    "from_numbered",
    "given_states",
    "group_options",
    "groups_of",
    "groups_of_file",
    "held_here",
    "is_loaded_by_code",
    "joined",
    "kept_by_optimizers",
    "load_extra_states",
    "misplaced",
    "names_by_identity",
    "names_of",
    "on_host",
    "owned_by",
    "pickled",
    "put_edits",
    "read_meta",
    "refuse_losses",
    "replaced_in",
    "schedulers_for",
    "set_apart",
    "shapes_of",
    "shown_states",
    "tensor_digests",
    "to_numbered",
    "whole_groups",
    "with_edits",
    "with_objects",
    "writers_of",
]
