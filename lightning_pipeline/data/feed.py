"""The loaders of this rank, prepared so that all stages of a replica see the same batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from lightning_pipeline._lightning import moves_batches_itself
from lightning_pipeline.data.loaders import (
    CHECKED_BATCHES,
    Gather,
    Peekable,
    SharedLoader,
    check_same_batch,
    check_same_length,
    needs_peeking,
    seed_workers_by_replica,
    seeded,
)
from lightning_pipeline.ranks import Outlet


class Feed:
    """Prepares loaders and checks batches.

    Args:
        replica: Of this rank.
        ranks: Global ranks of the replica, by pipeline rank.
        gather: Collects a number from each of them.
        outlet: From the rank that loads to the others with `data="broadcast"`, `None` with
            `data="replicate"`.
    """

    def __init__(self, replica: int, ranks: list[int], gather: Gather, outlet: Outlet | None) -> None:
        self._replica, self._ranks, self._gather, self._outlet = replica, ranks, gather, outlet
        self._prepared: list[tuple[Any, Peekable]] = []
        self.moved = 0
        """Batches moved to the device so far; what is drawn meanwhile follows from it."""
        self.seed = 0
        """Of random numbers drawn while a batch moves to the device; the same on all ranks."""

    def prepare(self, loader: Any) -> Any:
        """What `Strategy.process_dataloader` returns. All ranks call with their loaders in the same order."""
        for given, prepared in self._prepared:
            if loader is given or loader is prepared:
                return prepared  # evaluation loops set their data up again after it was looked at
        given = loader
        seed_workers_by_replica(loader, self._replica)
        if self._outlet is None:
            check_same_length(loader, self._gather, self._ranks)
        elif len(self._ranks) > 1:
            loader = SharedLoader(loader, self._outlet)
        if not needs_peeking(loader):
            return loader
        prepared = Peekable(loader)
        self._prepared.append((given, prepared))
        return prepared

    def check(self, batch: Any, batch_idx: int, step: str) -> None:
        """Compare the first batches of every epoch over the stages.

        Raises:
            BatchMismatchError: They differ.
        """
        if self._outlet is None and batch_idx < CHECKED_BATCHES and len(self._ranks) > 1:
            check_same_batch(batch, self._gather, self._ranks, f"batch {batch_idx} of {step}")

    @contextmanager
    def alike(self, module: LightningModule | None) -> Iterator[None]:
        """Inside, random numbers are the same on all stages of the replica, and new for every batch.

        Args:
            module: Whose hooks may draw; without any of the user's nothing is done.
        """
        self.moved += 1
        if module is None or not moves_batches_itself(module):
            yield
            return
        with seeded(self.seed, self._replica, self.moved):
            yield
