"""The loaders of this rank, prepared so that all stages of a replica see the same batches."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_pipeline._lightning import loaders_in, moves_batches_itself
from lightning_pipeline._torch import tree_leaves, tree_unflatten
from lightning_pipeline.data.draws import random_states, set_random_states
from lightning_pipeline.data.fingerprint import (
    CHECKED_BATCHES,
    Gather,
    check_same_batch,
    check_same_length,
    fingerprint,
)
from lightning_pipeline.data.loaders import (
    SharedLoader,
    first_of,
    needs_peeking,
    seed_workers_by_replica,
)
from lightning_pipeline.data.peekable import Peekable, Undone
from lightning_pipeline.ranks import Outlet


class Feed:
    """Prepares loaders and checks batches.

    Args:
        replica: Of this rank.
        ranks: Global ranks of the replica, by pipeline rank.
        gather: Collects a number from each of them.
        outlet: From the rank that loads, where one loads for all, to the others.
        how: `"replicate"`, `"broadcast"`, or `"auto"`: broadcast where the first batches differ.
    """

    def __init__(self, replica: int, ranks: list[int], gather: Gather, outlet: Outlet, how: str) -> None:
        self._replica, self._ranks, self._gather, self._outlet = replica, ranks, gather, outlet
        self._may_differ = how == "auto" and len(ranks) > 1
        self._shares = how == "broadcast" and len(ranks) > 1
        self._looked_at: list[Peekable] = []
        self._prepared: list[tuple[Any, Any]] = []
        self._looks = False

    def first(self, loaders: Any, undone: Undone) -> tuple[Any] | None:
        """The first batch of a loader, or of each of a collection, before any loop has them; all ranks call.

        Nothing is taken away from the run. With `"auto"` the first call decides whether one rank loads for
        all.

        Args:
            loaders: A loader, or a collection.
            undone: Of streams; see `Peekable`.

        Returns:
            The batch; `None` where a loader has none.
        """
        leaves, structure = loaders_in(loaders)
        peekable = tree_unflatten([self._peekable(loader, undone) for loader in leaves], structure)
        if not self._may_differ:
            return self._first(peekable)
        self._may_differ = False
        found = first_of(peekable)
        lengths = tuple(sized_len(loader) for loader in leaves)
        if len(set(self._gather(zlib.crc32(repr((found and fingerprint(found), lengths)).encode())))) == 1:
            return found
        self._shares = True
        rank_zero_warn(
            "the ranks of this pipeline load different data, so one rank loads for all from now on "
            "(data='broadcast'). To load on every rank, make the data repeatable: "
            "seed_everything(..., workers=True) before it is made, or a generator of its own. Data that are "
            "divided among processes (a sampler of your own by torch.distributed.get_rank() and "
            "trainer.world_size) are to be divided among replicas, as stages count there: by "
            "trainer.strategy.replica_index of trainer.strategy.num_replicas; else a share of them is seen"
        )
        return self._first(peekable)

    def _first(self, loaders: Any) -> tuple[Any] | None:
        if not self._shares:
            return first_of(loaders)
        looked_at = [one for one in tree_leaves(loaders) if type(one) is Peekable]
        found: tuple[Any] | None
        found, keep = self._outlet.share(lambda: (first_of(loaders), [one.keeps for one in looked_at]))
        for one, keeps in zip(looked_at, keep, strict=True):
            one.keeps = keeps
        return found

    def states_behind(self, loaders: Any) -> tuple[Any, ...]:
        """Random states as they are when the first batch, which was looked at, has been drawn by a loop.

        They move on: to be called where they are put back.
        """
        for loader in loaders_in(loaders)[0]:
            known = self._known(loader)
            if known is not None and known.behind is not None:
                set_random_states(known.behind)
            elif isinstance(loader, DataLoader) and loader.generator is None:
                torch.empty((), dtype=torch.int64).random_()  # as its iterator does, for the seed of workers
        return random_states()

    def _peekable(self, loader: Any, undone: Undone) -> Any:
        if not needs_peeking(loader):
            return loader
        known = self._known(loader)
        if known is None:
            seed_workers_by_replica(loader, self._replica)  # they start when it is looked at
            known = Peekable(loader, undone)
            self._looked_at.append(known)
        return known

    def _known(self, loader: Any) -> Peekable | None:
        """What holds the first item of a loader; Lightning may have made it anew, around the same data."""
        data = getattr(loader, "dataset", self)
        for known in self._looked_at:
            if loader is known or loader is known.loader or data is getattr(known.loader, "dataset", None):
                return known
        return None

    def is_so_anywhere(self, here: bool) -> bool:
        """Whether something is so on any rank of the replica; all of these call."""
        return any(self._gather(int(here)))

    def holds(self, loaders: Any) -> bool:
        """Whether an item of these was taken that another loader might not give again."""
        known = map(self._known, loaders_in(loaders)[0])
        return any(one is not None and one.keeps for one in known)

    def prepare(self, loader: Any) -> Any:
        """What `Strategy.process_dataloader` returns. All ranks call with their loaders in the same order."""
        for given, prepared in self._prepared:
            if loader is given or loader is prepared:
                return prepared  # evaluation loops set their data up again for each run of theirs
        seed_workers_by_replica(loader, self._replica)
        known = self._known(loader)
        prepared = loader
        if known is not None and known.keeps:
            prepared = known
        elif known is not None:
            known.forget()
        if self._shares:
            prepared = SharedLoader(prepared, self._outlet)
        else:
            check_same_length(loader, self._gather, self._ranks)
        if prepared is not loader:
            self._prepared.append((loader, prepared))
        return prepared

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, batches that move are none of the run's, and random numbers are alike already."""
        before, self._looks = self._looks, True
        try:
            yield
        finally:
            self._looks = before

    def check(self, batch: Any, batch_idx: int, step: str) -> None:
        """Compare the first batches of every epoch over the stages.

        Raises:
            BatchMismatchError: They differ.
        """
        if not self._shares and batch_idx < CHECKED_BATCHES and len(self._ranks) > 1:
            check_same_batch(batch, self._gather, self._ranks, f"batch {batch_idx} of {step}")

    @contextmanager
    def alike(self, module: LightningModule | None) -> Iterator[None]:
        """Inside, random numbers are the same on all stages of the replica: those of one device.

        Args:
            module: Whose hooks may draw; without any of the user's nothing is done.
        """
        draws = module is not None and moves_batches_itself(module)
        if draws and not self._looks and len(self._ranks) > 1:
            states = random_states()  # code that one rank alone runs may have drawn since the last batch
            if len(set(self._gather(zlib.crc32(repr(states).encode())))) > 1:
                set_random_states(self._outlet.share(lambda: states))
        yield
