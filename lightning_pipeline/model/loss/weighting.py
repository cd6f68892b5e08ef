"""What the loss of each micro-batch counts for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import ConfigurationError


@dataclass(frozen=True)
class Weights:
    """Of the micro-batches of one batch.

    Attributes:
        losses: What each loss is multiplied with; their sum is that of the batch.
        accumulate: Batches that one optimizer step adds up.
        settled: Whether the user has chosen them, so that no divisor is looked for.
    """

    losses: list[float]
    accumulate: int
    settled: bool

    @property
    def gradients(self) -> list[float]:
        """What each gradient is multiplied with."""
        return [weight / self.accumulate for weight in self.losses]


def weights_of(
    module: nn.Module, how: str | None, batches: Sequence[Any], sizes: Sequence[int], accumulate: int
) -> Weights:
    """What each micro-batch counts for, as far as that is known before it has run.

    Args:
        module: May have `microbatch_weight(batch)`, which then decides.
        how: The strategy's `loss_weighting`; None for steps without a loss.
        batches: The micro-batches.
        sizes: Their samples.
        accumulate: Batches that one optimizer step adds up.

    Raises:
        ConfigurationError: The hook returned something else than a number of at least 0.
    """
    own: Callable[[Any], Any] | None = getattr(module, "microbatch_weight", None) if how else None
    if own is not None:
        given = [_weight(own(batch), type(module).__name__) for batch in batches]
        total = sum(given)
        return Weights([weight / total if total else 0.0 for weight in given], accumulate, True)
    if how == "sum":
        return Weights([1.0] * len(sizes), accumulate, True)
    total = sum(sizes)
    return Weights([size / total for size in sizes], accumulate, how == "samples")


def _weight(value: Any, module: str) -> float:
    number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    if not number or not 0 <= float(value) < float("inf"):
        raise ConfigurationError(
            f"{module}.microbatch_weight(batch) returned {value!r}; it must return a number of at least 0, "
            "such as how many tokens of the micro-batch count"
        )
    return float(value)


def loss_of_batch(
    losses: Sequence[Tensor | None], parts: Sequence[Tensor | None], weights: Sequence[float]
) -> Tensor | None:
    """The loss that one device would have had; None when no micro-batch has one.

    Args:
        losses: Of each micro-batch; None where the step returned None.
        parts: What each is of the batch's, where its divisor was followed.
        weights: Of the losses where it was not. Those of micro-batches without a loss are left out of a mean.
    """
    counted = [
        (loss.detach(), part, weight)
        for loss, part, weight in zip(losses, parts, weights, strict=True)
        if loss is not None and (weight or part is not None)
    ]
    if not counted:
        return None if all(loss is None for loss in losses) else torch.tensor(float("nan"))
    if any(part is not None for _, part, _ in counted):
        return torch.stack(
            [(loss * w if part is None else part).reshape(()) for loss, part, w in counted]
        ).sum()
    is_mean = abs(sum(weights) - 1) < 1e-9
    kept = sum(weight for *_, weight in counted) if is_mean and len(counted) < len(losses) else 1.0
    if len(counted) == 1 and counted[0][2] == kept:
        return counted[0][0].reshape(())
    return torch.stack([loss.reshape(()) * (weight / kept) for loss, _, weight in counted]).sum()
