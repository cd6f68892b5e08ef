"""One batch of a run: split, planned, run, merged; its gradients; what is said when memory runs out."""

from lightning_pipeline.run.batch.batch import Batch, Steps
from lightning_pipeline.run.batch.gradients import Gradients
from lightning_pipeline.run.batch.out_of_memory import is_out_of_memory, watch_memory
from lightning_pipeline.run.batch.parts import Parts, samples_of, split_arguments, trains_batch_norm
from lightning_pipeline.run.batch.plans import Plans
from lightning_pipeline.run.batch.replan import Reordering

__all__ = [
    "Batch",
    "Gradients",
    "Parts",
    "Plans",
    "Reordering",
    "Steps",
    "is_out_of_memory",
    "samples_of",
    "split_arguments",
    "trains_batch_norm",
    "watch_memory",
]
