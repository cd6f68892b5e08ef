"""Activation checkpointing and replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch import Tensor


class _AsNonReentrant:
    """Stands in for torch's `CheckpointFunction` while a step is traced or replayed.

    The reentrant kind runs its function without a graph, so what a unit inside returns could not carry a
    gradient across a cut. The other kind computes the same. To be deleted when torch drops
    `use_reentrant=True`, as it announces.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Checkpoint `function(*args)` the non-reentrant way."""
        if not any(isinstance(value, Tensor) and value.requires_grad for value in args):
            with torch.no_grad():  # as there: torch warns that such a region is not trained
                return function(*args)
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve
        )


@contextmanager
def reentrant_checkpoint_replaced() -> Iterator[None]:
    """Run reentrant checkpoints as non-reentrant ones."""
    before = torch.utils.checkpoint.CheckpointFunction
    torch.utils.checkpoint.CheckpointFunction = _AsNonReentrant  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.utils.checkpoint.CheckpointFunction = before  # type: ignore[misc]
