"""The whole module on some ranks, in the middle of a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.model.split import OutsideSteps
from lightning_pipeline.ranks import Company
from lightning_pipeline.weights.after_fit import gather_weights, receives_all


@contextmanager
def gathered(
    module: LightningModule, split: OutsideSteps, held: Mapping[str, Tensor], replica: Company,
    world: Company, how: str,
) -> Iterator[LightningModule | None]:  # fmt: skip
    """Inside, some ranks have the whole module, and the others wait at the end; all ranks call.

    Args:
        module: Of the run.
        split: This rank's stages of it.
        held: Parameters and buffers that this rank has, by name.
        replica: The ranks that hold the module together.
        world: All ranks.
        how: "rank_zero" or "all".
    """
    everything = receives_all(how, replica.rank, staged=False)
    came = gather_weights(replica, split.owned_states(transient=True), held, everything=everything)
    if everything:
        with split.whole(came):
            yield module
    else:
        yield None
    world.barrier("the end of whole_model()")
