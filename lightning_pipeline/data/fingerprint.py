"""Whether batches are the same on all stages of a replica."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.data import sized_len
from torch import Tensor

from lightning_pipeline._torch import tree_leaves
from lightning_pipeline.errors import BatchMismatchError

CHECKED_BATCHES = 2
"""Batches at the start of every epoch whose equality over the stages is checked."""

_SAMPLE = 4096  # elements of a tensor that its fingerprint reads


def fingerprint(batch: Any) -> int:
    """A number that two different batches are unlikely to share. Reads a sample of each tensor.

    Args:
        batch: Any nesting of tensors, numbers and strings.
    """
    crc = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):  # of the user's own class
            crc = zlib.crc32(f"{list(leaf)}{fingerprint(list(leaf.values()))}".encode(), crc)
        else:
            crc = zlib.crc32(_bytes_of(leaf), crc)
    return crc


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        head = f"{tuple(leaf.shape)}{leaf.dtype}".encode()
        if leaf.layout is not torch.strided or leaf.is_quantized:
            return head
        flat = leaf.detach().as_subclass(Tensor).reshape(-1)  # a project's own class may check its shape
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
