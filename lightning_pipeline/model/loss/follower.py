"""Whether and how the numbers of a kind of step are followed, batch by batch."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.loss.shares import VALUES, Observer, Share, Shares, Whole

_WAYS_OUT = (
    "override `microbatch_weight(batch)` on the LightningModule with what it divides by (what the "
    "micro-batch counts for), or ask for the mean over samples of the micro-batches' losses by "
    "PipelineStrategy(loss_weighting='samples')"
)


class Follower:
    """Finds what each number that a step works out is worth in the batch, on the stage that has it.

    Where the numbers of a batch turned out to be plain means over samples, which shapes alone say, the
    batches after it are not looked at.

    Args:
        root: The LightningModule.
        step: Name of its method.
    """

    def __init__(self, root: nn.Module, step: str) -> None:
        self._root, self._step = root, step
        self._fractions: Sequence[float] = ()
        self._targets: list[tuple[int, int]] | None = None  # of a step that is plain where these are complete
        self._whole: Whole | None = None
        self._shares: Shares | None = None
        self._plain = True
        self.strayed = ""

    def begin(
        self, fractions: Sequence[float], batch: Sequence[Tensor], rehearse: Callable[[Observer], None]
    ) -> None:
        """A batch comes.

        Args:
            fractions: Samples of each micro-batch over those of the batch.
            batch: Its tensors.
            rehearse: Runs the step over the whole batch under an observer.
        """
        self._fractions, self._whole, self._shares = fractions, None, None
        if self._targets is not None and not _any_left_out(batch, self._targets):
            return
        observer = Observer(batch)
        rehearse(observer)
        self._whole, self._plain = observer.whole, not observer.whole.ragged

    @property
    def follows(self) -> bool:
        """Whether the functions of this batch's micro-batches are to be seen."""
        return self._whole is not None

    def microbatch(self, microbatch: int) -> Shares | None:
        """A micro-batch comes; None where nothing is to be followed."""
        if self._whole is not None:
            self._shares = Shares(self._whole, self._root, self._fractions[microbatch])
        return self._shares

    def part(self, value: Any) -> tuple[Any, bool]:
        """This micro-batch's part of a number that the step hands out.

        Returns:
            The part, and whether it is anything else than the number weighted by samples. The part is None
            where nothing is followed.
        """
        shares = self._shares
        if shares is None:
            return None, False
        share = shares.of(value)
        self._note(shares, share)
        if share is None or share.lost:
            return value * shares.fraction, False
        total = share.total()
        return 0.0 if total is None else total, not shares.is_mean(share)

    def loss(self, loss: Tensor) -> Share | None:
        """The share of a loss; None where it is weighted by samples.

        Raises:
            SplitError: It is divided by what differs between micro-batches, and could not be followed.
        """
        shares = self._shares
        if shares is None:
            return None
        share = shares.of(loss)
        self._note(shares, share)
        if shares.strayed and (share is None or share.lost):
            self._stray(shares)
        if share is None or shares.is_mean(share):
            return None
        if share.lost:
            raise SplitError(
                f"what {self._step} returns is divided by what differs between micro-batches, and cannot be "
                f"followed from {share.lost} on: {_WAYS_OUT}"
            )
        return share

    def _stray(self, shares: Shares) -> None:
        """The micro-batch went another way than the batch as a whole, such as a loop over samples."""
        assert self._whole is not None, "it strayed from this"
        if self._whole.ragged or self._whole.reads or None in self._whole.targets:
            raise SplitError(
                f"what {self._step} returns cannot be compared with what it would for the whole batch: "
                f"from {shares.strayed} on, a micro-batch calls other functions, and values of the batch "
                f"decide what the loss is divided by: {_WAYS_OUT}"
            )
        if not self.strayed:
            warnings.warn(
                f"{self._step} calls other functions for a micro-batch than for the batch as a whole, from "
                f"{shares.strayed} on, so that its loss is taken for a mean over samples. If it is not: "
                f"{_WAYS_OUT}"
            )
        self.strayed = shares.strayed

    def end(self) -> None:
        """The batch is done: look at the next ones only where this one needed it."""
        whole, self._whole, self._shares = self._whole, None, None
        if whole is not None and self._plain and None not in whole.targets:
            self._targets = [target for target in whole.targets if target is not None]

    def _note(self, shares: Shares, share: Share | None) -> None:
        """Whether shapes alone say that a number is a plain mean, or all targets of its loss count."""
        if share is not None and (share.origin == VALUES or not shares.is_mean(share)):
            self._plain = False


def _any_left_out(batch: Sequence[Tensor], targets: Sequence[tuple[int, int]]) -> bool:
    """Whether a loss over classes leaves out any target of a batch."""
    if any(position >= len(batch) for position, _ in targets):
        return True
    return any(bool((batch[position] == left_out).any()) for position, left_out in set(targets))


def seeds_of(share: Share, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Where the backward of a loss begins, and with what.

    Args:
        share: Of the loss.
        scale: Of all gradients.
    """
    return [
        (tensor, torch.full_like(tensor.detach(), factor * scale))
        for factor, tensor in share.terms
        if factor and tensor.requires_grad
    ]
