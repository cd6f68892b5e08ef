"""One batch of a run: split, planned, run, merged; its gradients; what is said when memory runs out."""

from lightning_pipeline.run.batch.batch import Batch, Steps
from lightning_pipeline.run.batch.gradients import Gradients
from lightning_pipeline.run.batch.memory import StagesMeter, is_out_of_memory, watch_memory
from lightning_pipeline.run.batch.parts import Parts, samples_of, split_arguments, trains_batch_norm
from lightning_pipeline.run.batch.plans import Plans
from lightning_pipeline.run.batch.replan import reordering_by

__all__ = [
    "Batch",
    "Gradients",
    "Parts",
    "Plans",
    "StagesMeter",
    "Steps",
    "is_out_of_memory",
    "reordering_by",
    "samples_of",
    "split_arguments",
    "trains_batch_norm",
    "watch_memory",
]
