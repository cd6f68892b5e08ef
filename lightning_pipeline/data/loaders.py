"""Data for a replica: every stage must see the same batch, and one is looked at before training starts."""

import copy
import os
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader

from lightning_pipeline._torch import tree_flatten, tree_unflatten
from lightning_pipeline.data.draws import loader_kept
from lightning_pipeline.data.peekable import Peekable, something_of
from lightning_pipeline.ranks import Outlet


class SharedLoader:
    """A loader that one rank of a replica reads and sends to the others: `data="broadcast"`.

    Args:
        loader: The user's loader. Only the source iterates it.
        outlet: From the rank that reads to the other ranks of the replica; all make theirs together.
    """

    def __init__(self, loader: Any, outlet: Outlet) -> None:
        self.loader, self._outlet = loader, outlet
        self._length: int | None = outlet.share(partial(sized_len, loader))

    def __iter__(self) -> Iterator[Any]:
        return self._items(iter(self.loader) if self._outlet.is_source else iter(()))

    def _items(self, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            found, item = self._outlet.share(partial(_next_of, items))
            if not found:
                return
            yield item

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} on the rank that loads has no length")
        return self._length

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # `isinstance` finds the user's class
        return type(self.loader) if "loader" in vars(self) else SharedLoader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def _next_of(items: Iterator[Any]) -> tuple[bool, Any]:
    try:
        return True, next(items)
    except StopIteration:
        return False, None


def seed_workers_by_replica(loader: Any, replica: int) -> None:
    """Make the workers of all stages of a replica draw alike.

    After `seed_everything(workers=True)` Lightning seeds workers by global rank, but keeps a function that is
    set already.
    """
    wanted = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))
    if wanted and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


def inner(loader: Any) -> Any:
    """What a shared loader reads; any other is its own."""
    return loader.loader if type(loader) is SharedLoader else loader


def needs_peeking(loader: Any) -> bool:
    """Whether reading a first batch may take it away from the run."""
    return type(loader) is Peekable or not isinstance(loader, DataLoader) or has_iterable_dataset(loader)


def first_of(loaders: Any) -> tuple[Any] | None:
    """The first batch of a loader, or of each loader of a collection, in the collection's shape.

    A map-style loader is read in this process, without its workers and without moving its sampler. What is
    None, as where nothing of a batch could be read, trains nothing: the first batch is the next.

    Returns:
        The batch; `None` where a loader is empty, or where there is no loader, as in `[]`.
    """
    leaves, structure = tree_flatten(loaders)
    firsts = [_first_batch(loader) for loader in leaves]
    if not firsts or any(found is None for found in firsts):
        return None
    return (tree_unflatten([found[0] for found in firsts if found is not None], structure),)


def _first_batch(loader: Any) -> tuple[Any] | None:
    try:
        return (_read_first(loader),)
    except StopIteration:
        return None


def _read_first(loader: Any) -> Any:
    if type(loader) is Peekable:
        return loader.peek()
    assert isinstance(loader, DataLoader), f"{type(loader).__name__} was not made peekable"
    with loader_kept(loader):
        if _makes_its_own(loader):
            return something_of(partial(next, batches) for batches in repeat(iter(_alone(loader))))[-1]
        return something_of(partial(_collated, loader, chosen) for chosen in loader._index_sampler)[-1]


def _makes_its_own(loader: DataLoader[Any]) -> bool:
    """Whether a class of the project's says what is iterated, and keeps no iterator from which that takes."""
    holds = any(hasattr(type(one), "__next__") for one in vars(loader).values())
    return type(loader).__iter__ is not DataLoader.__iter__ and not holds


def _alone(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, reading in this process."""
    made = copy.copy(loader)
    object.__setattr__(made, "num_workers", 0)
    return made


def _collated(loader: DataLoader[Any], chosen: Any) -> Any:
    data: Any = loader.dataset
    if not loader._auto_collation:  # which a loader of the project's may say for itself
        return loader.collate_fn(data[chosen])
    if hasattr(data, "__getitems__"):
        return loader.collate_fn(data.__getitems__(list(chosen)))
    return loader.collate_fn([data[index] for index in chosen])
