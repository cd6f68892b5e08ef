"""Data for a replica: every stage must see the same batch, and one is looked at before training starts."""

import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipeline._torch import tree_flatten, tree_leaves, tree_unflatten
from lightning_pipeline.errors import BatchMismatchError
from lightning_pipeline.ranks import Outlet

CHECKED_BATCHES = 2
"""Batches at the start of every epoch whose equality over the stages is checked."""

_SAMPLE = 4096  # elements of a tensor that its fingerprint reads


class Peekable:
    """An iterable whose first item can be looked at before it is iterated, without losing it.

    Args:
        loader: Any iterable; one-shot iterators too. Other attributes are the loader's own.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._ahead: tuple[Any, Iterator[Any]] | None = None

    def peek(self) -> Any:
        """The first item of the next iteration.

        Raises:
            StopIteration: There is none.
        """
        if self._ahead is None:
            rest = iter(self.loader)
            self._ahead = next(rest), rest
        return self._ahead[0]

    def forget(self) -> None:
        """Drop the item that was looked at: the loader was told to go on elsewhere."""
        self._ahead = None

    def __iter__(self) -> Iterator[Any]:
        # A generator: its body starts at the first `next`, after a `peek` that came behind `iter()`.
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            yield from self.loader
            return
        yield ahead[0]
        yield from ahead[1]

    def __len__(self) -> int:
        return len(self.loader)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # `isinstance` finds the user's class
        return type(self.loader) if "loader" in vars(self) else Peekable

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_ahead"):  # while being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


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
        items = iter(self.loader) if self._outlet.is_source else iter(())
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
    for item in items:
        return True, item
    return False, None


def seed_workers_by_replica(loader: Any, replica: int) -> None:
    """Make the workers of all stages of a replica draw alike.

    After `seed_everything(workers=True)` Lightning seeds workers by global rank, but keeps a function that is
    set already.
    """
    wanted = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))
    if wanted and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


def needs_peeking(loader: Any) -> bool:
    """Whether reading a first batch may take it away from the run."""
    return type(loader) is Peekable or not isinstance(loader, DataLoader) or has_iterable_dataset(loader)


def first_of(loaders: Any) -> tuple[Any] | None:
    """The first batch of a loader, or of each loader of a collection, in the collection's shape.

    A map-style loader is read in this process, without its workers and without moving its sampler.

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
    batches = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    with _generators_kept(loader, loader.sampler, batches, getattr(batches, "sampler", None)):
        chosen = next(iter(batches))
        if loader.batch_sampler is None:
            return loader.collate_fn(loader.dataset[chosen])
        if hasattr(loader.dataset, "__getitems__"):
            return loader.collate_fn(loader.dataset.__getitems__(list(chosen)))
        return loader.collate_fn([loader.dataset[index] for index in chosen])


@contextmanager
def _generators_kept(*holders: Any) -> Iterator[None]:
    values = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    states = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def random_states() -> tuple[Any, ...]:
    """The states that code outside a step draws from: torch's on the CPU, numpy's and Python's."""
    return torch.get_rng_state().numpy().tobytes(), _bare(numpy.random.get_state()), random.getstate()


def _bare(state: Any) -> tuple[Any, ...]:
    name, keys, *rest = state
    return (name, keys.tobytes(), *rest)


def set_random_states(states: tuple[Any, ...]) -> None:
    """Continue from what `random_states` gave."""
    torch_state, (name, keys, *rest), python = states
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    random.setstate(python)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Draw from a state that the key decides, and leave all random states as they were."""
    seed = zlib.crc32(repr(key).encode())
    host, python = numpy.random.get_state(), random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            numpy.random.set_state(host)
            random.setstate(python)


def fingerprint(batch: Any) -> int:
    """A number that two different batches are unlikely to share. Reads a sample of each tensor.

    Args:
        batch: Any nesting of tensors, numbers and strings.
    """
    crc = 0
    for leaf in tree_leaves(batch):
        crc = zlib.crc32(_bytes_of(leaf), crc)
    return crc


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        head = f"{tuple(leaf.shape)}{leaf.dtype}".encode()
        if leaf.layout is not torch.strided or leaf.is_quantized:
            return head
        flat = leaf.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].contiguous().cpu()
        return head + sample.view(torch.uint8).numpy().tobytes() if sample.numel() else head
    if isinstance(leaf, str | bytes | int | float | bool | None):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()


Gather = Callable[[int], Sequence[int]]
"""Gives every rank's number, in order of the pipeline."""


def check_same_batch(batch: Any, gather: Gather, ranks: Sequence[int], where: str) -> None:
    """Refuse batches that differ between the stages of a replica.

    Args:
        batch: This rank's batch.
        gather: Collects a number from each rank of the replica.
        ranks: The replica's global ranks, in the order of `gather`.
        where: The step and the batch, for the message.

    Raises:
        BatchMismatchError: On every rank of the replica.
    """
    prints = gather(fingerprint(batch))
    if len(set(prints)) > 1:
        seen = ", ".join(f"rank {rank}: {value:08x}" for rank, value in zip(ranks, prints, strict=True))
        raise BatchMismatchError(
            f"the stages of one replica were given different batches in {where} ({seen}). Make loading "
            "repeatable (seed_everything(..., workers=True), no random numbers that depend on the rank or "
            'the time), or let one rank load for all: PipelineStrategy(data="broadcast")'
        )


def check_same_length(loader: Any, gather: Gather, ranks: Sequence[int]) -> None:
    """Refuse loaders of different lengths within a replica: the shorter one would end its epoch alone.

    Raises:
        BatchMismatchError: On every rank of the replica.
    """
    length = sized_len(loader)
    lengths = gather(-1 if length is None else length)
    if len(set(lengths)) > 1:
        seen = ", ".join(f"rank {rank}: {n}" for rank, n in zip(ranks, lengths, strict=True))
        raise BatchMismatchError(
            f"the stages of one replica have dataloaders of different lengths ({seen}; -1: unknown). Give "
            'each the same data, or let one rank load for all: PipelineStrategy(data="broadcast")'
        )
