"""A batch, split into the arguments of a step for each micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from lightning_pipeline._torch import AnyBatchNorm
from lightning_pipeline.data import batch_size_of, has_samples, split_batch
from lightning_pipeline.errors import ConfigurationError


@dataclass
class Parts:
    """A batch, split.

    Attributes:
        args: The arguments of the step for each micro-batch.
        sizes: Samples of each micro-batch; 1 each where the batch does not tell.
        batch_size: Samples of all; `None` where the batch does not tell.
    """

    args: list[tuple[Any, ...]]
    sizes: list[int]
    batch_size: int | None


def split_arguments(
    module: LightningModule, args: Sequence[Any], num_microbatches: int, *, at_least: int = 1
) -> Parts:
    """Split the batch, the first argument of every step; the others go to each micro-batch.

    Args:
        module: May override with `split_batch(batch, num_microbatches)`, which returns a list of parts.
        args: Of the step.
        num_microbatches: At most so many parts.
        at_least: Samples that each part should have, where we split.
    """
    batch, rest = args[0], tuple(args[1:])
    own: Callable[[Any, int], Sequence[Any]] | None = getattr(module, "split_batch", None)
    if own is None:
        pairs = split_batch(batch, num_microbatches, at_least=at_least)
        sizes = [size for _, size in pairs]
        total = sum(sizes) if has_samples(batch) else None
        return Parts([(part, *rest) for part, _ in pairs], sizes, total)
    parts = list(own(batch, num_microbatches))
    if not parts:
        raise ConfigurationError(f"{type(module).__name__}.split_batch returned no parts")
    return _sized([(part, *rest) for part in parts])


def samples_of(module: LightningModule, args: Sequence[Any]) -> int | None:
    """Samples of a batch that is to be split; `None` where there is nothing to split.

    Raises:
        ConfigurationError: Nothing tells how many there are.
    """
    if getattr(module, "split_batch", None) is not None:
        return split_arguments(module, args, 1).batch_size
    return batch_size_of(args[0]) if has_samples(args[0]) else None


def trains_batch_norm(module: LightningModule) -> bool:
    """Whether a part of the module needs two samples to train: with one there is no variance."""
    kinds = AnyBatchNorm
    return any(isinstance(part, kinds) and part.training for part in module.modules())


def _sized(args: list[tuple[Any, ...]]) -> Parts:
    try:
        sizes = [batch_size_of(part) for part, *_ in args]
    except ConfigurationError:  # only the user's split_batch knows what a sample is: parts count alike
        return Parts(args, [1] * len(args), None)
    return Parts(args, sizes, sum(sizes))
