"""Loaders, batches, and the micro-batches that a batch is split into."""

from lightning_pipeline.data.draws import (
    holders_of,
    loader_parts,
    random_states,
    random_states_kept,
    seeded,
    set_random_states,
    set_state,
    state_of,
)
from lightning_pipeline.data.feed import Feed
from lightning_pipeline.data.first_batch import EarlyLoaders
from lightning_pipeline.data.loaders import inner
from lightning_pipeline.data.mappings import of_class, unfillable, with_values
from lightning_pipeline.data.merge import merge_outputs
from lightning_pipeline.data.microbatch import (
    SharedPlaces,
    batch_size_of,
    how_cut,
    rebuilt,
    signature_of,
    split_batch,
)
from lightning_pipeline.data.position import Position
from lightning_pipeline.data.samples import Loaded, has_samples, items_of

__all__ = [
    "EarlyLoaders",
    "Feed",
    "Loaded",
    "Position",
    "SharedPlaces",
    "batch_size_of",
    "has_samples",
    "holders_of",
    "how_cut",
    "inner",
    "items_of",
    "loader_parts",
    "merge_outputs",
    "of_class",
    "random_states",
    "random_states_kept",
    "rebuilt",
    "seeded",
    "set_random_states",
    "set_state",
    "signature_of",
    "split_batch",
    "state_of",
    "unfillable",
    "with_values",
]
