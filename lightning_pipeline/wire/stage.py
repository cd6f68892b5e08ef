"""What the executor asks of a stage, and what crosses the cut between two stages."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True)
class Values:
    """What crosses one cut for one micro-batch.

    Args:
        tensors: In the cut's order. Whether each requires gradient is part of the contract.
        table: Opaque, picklable and comparable description of everything upstream. It travels only when
            it changes; the receiver gets the same object every time it does not.
        empty: The step ended without a result before any later stage's unit: nothing follows downstream
            and nothing comes back. The stage's backward of that micro-batch is not called.
    """

    tensors: list[Tensor]
    table: Hashable = None
    empty: bool = False


class Stage(Protocol):
    """Runs its part of the model and owns the autograd graph of each micro-batch."""

    @property
    def index(self) -> int:
        """Position in model order, from 0."""
        ...

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        """Run one micro-batch.

        Args:
            microbatch: Index of the micro-batch.
            incoming: What the stage before sent; its tensors are autograd leaves. None on stage 0.

        Returns:
            What the next stage gets; None on the last stage.
        """
        ...

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        """Run the full backward (`B`) of one micro-batch.

        Args:
            microbatch: Index of the micro-batch.
            gradients: One entry for each tensor that was sent, None where there is no gradient. The
                argument is None on the last stage, which has its own loss.

        Returns:
            One entry for each tensor that was received, None where there is no gradient. None on stage 0.
        """
        result = self.backward_input(microbatch, gradients)
        self.backward_weight(microbatch)
        return result

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        """Compute the input gradients only (`I`); arguments and result as of `backward`."""
        ...

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` left (`W`)."""
        ...
