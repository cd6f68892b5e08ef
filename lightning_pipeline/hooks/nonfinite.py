"""Gradients that are inf or nan: the optimizer steps all the same, leaves the step out, or the run ends."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_pipeline.errors import NonFiniteError

_SHOWN = 3


class _LeftOut(Exception):
    """Leads out of an optimizer that has called its closure and changed nothing yet."""

    def __init__(self, result: Any) -> None:
        super().__init__("this step is left out")
        self.result = result


class FiniteSteps:
    """Takes an optimizer's step, unless a gradient is inf or nan.

    Args:
        policy: `on_nonfinite` of the strategy.

    Attributes:
        left_out: Steps that were not taken.
        is_left_out: Whether the last one was not.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.taken = self.left_out = 0
        self.is_left_out = False

    def step(
        self,
        step: Callable[[Callable[[], Any]], Any],
        closure: Callable[[], Any],
        find: Callable[[], list[str]],
    ) -> Any:
        """Take a step, unless it is not to be taken.

        Args:
            step: Of the optimizer; calls the closure that it is given before it changes anything.
            closure: Makes the gradients.
            find: Names those that are not finite, the same on every rank.

        Raises:
            NonFiniteError: There are some, and the policy is "raise".
        """
        calls = 0

        def guarded() -> Any:
            nonlocal calls
            result, calls = closure(), calls + 1
            if calls > 1:  # an optimizer that searches has changed weights by now
                return result
            found = find()
            self.is_left_out = bool(found)
            if found and self.policy == "raise":
                raise NonFiniteError(
                    f"gradients are not finite: {_listed(found)}. No weight was changed. Lower the learning "
                    'rate, clip gradients, or leave such steps out with PipelineStrategy(on_nonfinite="skip")'
                )
            if found:
                self._count(found)
                raise _LeftOut(result)
            self.taken += 1
            return result

        try:
            return step(guarded)
        except _LeftOut as left:
            return left.result

    def _count(self, found: Sequence[str]) -> None:
        self.left_out += 1
        if self.left_out == 1:
            rank_zero_warn(
                f"an optimizer step was left out, for gradients are not finite: {_listed(found)}. Further "
                "ones are counted in PipelineStrategy.skipped_steps"
            )

    def tell(self) -> None:
        """Say at the end of a run how many steps were left out."""
        if self.left_out:
            rank_zero_info(
                f"{self.left_out} of {self.left_out + self.taken} optimizer steps were left out, for "
                'gradients were not finite (on_nonfinite="skip")'
            )


def _listed(found: Sequence[str]) -> str:
    more = f" and of {len(found) - _SHOWN} more ranks" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def first_not_finite(gradients: Iterable[Tensor]) -> int | None:
    """The position of the first gradient with an element that is inf or nan; one look at the device."""
    answers = [_is_finite(gradient.detach()) for gradient in gradients]
    if not answers:
        return None
    bad = (~torch.stack(answers)).nonzero()
    return int(bad[0]) if len(bad) else None


def _is_finite(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient._values()  # as it is: elements that are added up later may overflow only then
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=gradient.device)
    low, high = torch.aminmax(gradient)  # one pass and no copy; nan wins
    return torch.isfinite(low) & torch.isfinite(high)


class AgreedGradients:
    """What each rank finds among its gradients, known to all: it travels with what they exchange anyway.

    Within a replica it is the end of the step, which brings the loss to every rank; between replicas the
    averaging of gradients. A rank tells a number: 0, or which parameter of the whole module is the first
    whose gradient is not finite.

    Args:
        names: Of all parameters of the whole module, in its order.
        stages_of: Of a parameter.
        owned: This rank's parameters by name.
        replica: Of this rank.
        replicas: How many there are.
        global_rank: Of a pipeline rank (first) of a replica (second).
    """

    def __init__(
        self,
        names: Sequence[str],
        stages_of: Callable[[str], Sequence[int]],
        owned: Iterable[tuple[str, Tensor]],
        replica: int,
        replicas: int,
        global_rank: Callable[[int, int], int],
    ) -> None:
        self._names, self._stages_of, self._global_rank = names, stages_of, global_rank
        positions = {name: position for position, name in enumerate(names)}
        self._positions = {id(parameter): positions[name] for name, parameter in owned}
        self._replica, self._replicas = replica, replicas
        self._numbers: list[int] = []
        self.counts = False
        """Whether an optimizer steps after this batch."""

    def own(self, totals: Iterable[tuple[Tensor, Tensor]]) -> int:
        """This rank's number.

        Args:
            totals: Its parameters and the gradients that the optimizer would step with.
        """
        if not self.counts:
            return 0
        found = [(parameter, gradient) for parameter, gradient in totals if id(parameter) in self._positions]
        first = first_not_finite(gradient for _, gradient in found)
        return 0 if first is None else 1 + self._positions[id(found[first][0])]

    def of_replica(self, numbers: Sequence[int]) -> None:
        """The numbers of this replica's ranks, by pipeline rank."""
        others = [0] * len(numbers)
        parts = [list(numbers) if r == self._replica else others for r in range(self._replicas)]
        self._numbers = [number for part in parts for number in part]

    @property
    def numbers(self) -> list[int]:
        """To be summed over the replicas; empty with one."""
        return self._numbers if self._replicas > 1 else []

    def of_all(self, numbers: Sequence[int]) -> None:
        """Those sums."""
        if self._replicas > 1:
            self._numbers = list(numbers)

    def found(self) -> list[str]:
        """What was found, by rank, in words."""
        size = len(self._numbers) // self._replicas if self._numbers else 0
        return [
            self._words(self._names[number - 1], *reversed(divmod(place, size)))
            for place, number in enumerate(self._numbers)
            if number
        ]

    def _words(self, name: str, rank: int, replica: int) -> str:
        stages = ", ".join(map(str, self._stages_of(name)))
        where = f"global rank {self._global_rank(rank, replica)}, stage {stages}"
        return f"that of {name} on pipeline rank {rank} ({where})"
