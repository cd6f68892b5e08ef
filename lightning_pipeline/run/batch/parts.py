"""A batch, split into the arguments of a step for each micro-batch."""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, default_collate

from lightning_pipeline import _lightning
from lightning_pipeline._torch import AnyBatchNorm
from lightning_pipeline.data import Loaded, batch_size_of, has_samples, how_cut, split_batch
from lightning_pipeline.data import SharedPlaces as SharedPlaces
from lightning_pipeline.errors import ConfigurationError, PipelineError, SplitError


@dataclass
class Parts:
    """A batch, split.

    Attributes:
        args: The arguments of the step for each micro-batch.
        sizes: Samples of each micro-batch; 1 each where the batch does not tell.
        batch_size: Samples of all; `None` where the batch does not tell.
        is_users: Whether the user's `split_batch` made them.
        refusal: Why this is one part where others of the step were cut; None where nothing was in the way.
    """

    args: list[tuple[Any, ...]]
    sizes: list[int]
    batch_size: int | None
    is_users: bool = True
    refusal: ConfigurationError | None = None

    @contextmanager
    def explained(self, batch: Any) -> Iterator[None]:
        """Around code that sees micro-batches: an error says how the batch was cut.

        Args:
            batch: Whose parts these are.
        """
        try:
            yield
        except Exception as error:
            cause = error.__cause__ if isinstance(error, SplitError) else error  # of a step's trace
            by_size = not isinstance(cause, PipelineError | MemoryError | torch.OutOfMemoryError | None)
            for text in (self.how_cut(batch), self._how_large() if by_size else ""):
                if text and text not in getattr(error, "__notes__", ()):
                    error.add_note(text)
            raise

    def _how_large(self) -> str:
        """How many samples micro-batches have, where that is another number than the batch's."""
        if self.batch_size is None or len(self.args) == 1:
            return ""
        sizes = " or ".join(map(str, sorted(set(self.sizes))))
        return (
            f"The step ran on micro-batches of {sizes} of the batch's {self.batch_size} samples. What fails "
            "with so few (the largest three, a variance) needs fewer micro-batches: num_microbatches=1 has "
            "them all. What relates samples with each other (an adjacency matrix) is cut by rows alone, "
            "unless `split_batch(batch, num_microbatches)` on the LightningModule cuts it."
        )

    def how_cut(self, batch: Any) -> str:
        """How we cut a batch, where not all of it is cut; otherwise nothing."""
        if self.is_users or len(self.args) == 1:
            return ""
        cut, whole = how_cut(batch, self.args[0][0])
        if not whole:
            return ""
        pieces = ", ".join(f"{name} {of} to {part}" for name, of, part in cut)
        shared = ", ".join(f"{name} {of}" for name, of, _ in whole)
        return (
            f"The batch was cut into micro-batches by the first dimension: {pieces}; each part gets whole: "
            f"{shared}. If these hold samples too, or belong to single ones (graphs, "
            "joined views, loaders of other batch sizes), override `split_batch(batch, num_microbatches)` on "
            "the LightningModule, which returns a list of micro-batches."
        )

    def has_other_rows(self, batch: Any) -> bool:
        """Whether each part got a tensor whole that has rows, which may be samples, or ends of them, too.

        One with a single row is the same for all samples, as a mask that is broadcast.
        """
        if self.is_users or len(self.args) == 1:
            return False
        _, whole = how_cut(batch, self.args[0][0])
        return any(of[0] > 1 for _, of, _ in whole)


def split_arguments(
    module: LightningModule, step: str, args: Sequence[Any], num_microbatches: int, *,
    at_least: int = 1, says: bool = False, shared: SharedPlaces | None = None,
) -> Parts:  # fmt: skip
    """Split the batch, the first argument of every step; the others go to each micro-batch.

    Args:
        module: May override with `split_batch(batch, num_microbatches)`, which returns a list of parts.
        step: That is given it.
        args: Of the step.
        num_microbatches: At most so many parts.
        at_least: Samples that each part should have, where we split.
        says: Whether to warn where not everything with rows was cut.
        shared: What is known of batches before; told of this one.
    """
    batch, rest = args[0], tuple(args[1:])
    own: Callable[[Any, int], Sequence[Any]] | None = getattr(module, "split_batch", None)
    if own is None:
        loaded = _loaded(module, step)
        if loaded is not None and loaded.several and shared is not None:
            loaded = loaded._replace(number=shared.cut_before(batch))
        pairs = split_batch(batch, num_microbatches, at_least=at_least, loaded=loaded)
        if loaded is not None and loaded.several and shared is not None and shared.breaks(batch, pairs[0][0]):
            pairs = [(batch, sum(size for _, size in pairs))]  # the last batch of one loader is shorter
        sizes = [size for _, size in pairs]
        total = sum(sizes) if has_samples(batch) else None
        microbatches = [part for part, _ in pairs]
        if shared is not None and len(pairs) > 1:
            microbatches = [shared.kept(batch, part) for part in microbatches]
            shared.learn(batch, microbatches[0])
        parts = Parts([(part, *rest) for part in microbatches], sizes, total, is_users=False)
        if says and parts.has_other_rows(batch):
            rank_zero_warn(parts.how_cut(batch))
        return parts
    own_parts = list(own(batch, num_microbatches))
    if not own_parts:
        raise ConfigurationError(f"{type(module).__name__}.split_batch returned no parts")
    return _sized([(part, *rest) for part in own_parts])


def split_again(
    module: LightningModule, step: str, args: Sequence[Any], num_microbatches: int, **options: Any
) -> Parts:
    """As `split_arguments`, for a batch after others of its step: one that cannot be split is one part."""
    try:
        return split_arguments(module, step, args, num_microbatches, **options)
    except ConfigurationError as error:
        return replace(split_arguments(module, step, args, 1), refusal=error)


def samples_of(module: LightningModule, step: str, args: Sequence[Any]) -> int | None:
    """Samples of a batch that is to be split; `None` where there is nothing to split.

    Raises:
        ConfigurationError: Nothing tells how many there are.
    """
    if getattr(module, "split_batch", None) is not None:
        return split_arguments(module, step, args, 1).batch_size
    return batch_size_of(args[0], _loaded(module, step)) if has_samples(args[0]) else None


def _loaded(module: LightningModule, step: str) -> Loaded | None:
    """What the loaders say of a batch; None where there are none, or they are not torch's."""
    if module._trainer is None:
        return None
    loaders, together = _lightning.loaders_behind(module._trainer, step)
    plain = bool(loaders) and all(isinstance(one, DataLoader) for one in loaders)
    if together:
        collated = plain and all(one.collate_fn is default_collate for one in loaders)
        return Loaded(several=True, collated=collated)
    return Loaded(sizes=frozenset(size for one in loaders for size in _sizes(one))) if plain else None


def _sizes(loader: DataLoader[Any]) -> Iterator[int]:
    """How many samples batches of a loader have; nothing where a sampler of batches decides."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        yield size
        if isinstance(loader.sampler, Sized) and len(loader.sampler) % size:
            yield len(loader.sampler) % size


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
