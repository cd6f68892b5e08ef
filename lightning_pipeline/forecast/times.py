"""How long each stage takes, as worked out from its operations or as measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipeline.forecast.assumptions import Assumptions
from lightning_pipeline.forecast.candidates import SPLIT_SURPLUS
from lightning_pipeline.forecast.profile import StageProfile
from lightning_pipeline.schedules import Costs


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch, by stage.

    Attributes:
        forward: Of a forward.
        backward: Of a backward in one piece.
        backward_input: Of its input-gradient half, where a plan splits it.
        backward_weight: Of its weight-gradient half.
        send: Of one hop between ranks.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send: float

    def costs(self, splits_backward: bool, activation_bytes: Sequence[float]) -> Costs:
        """For the simulator.

        Args:
            splits_backward: Whether the plan runs backwards in two halves.
            activation_bytes: Held for one micro-batch, by stage.
        """
        halves = (self.backward_input, self.backward_weight)
        if not splits_backward:
            halves = (self.backward, (0.0,) * len(self.backward))
        return Costs(self.forward, *halves, send=self.send, activation=list(activation_bytes))

    @property
    def alone(self) -> float:
        """Of one micro-batch through all stages on one device."""
        return sum(self.forward) + sum(self.backward)


def estimated(stages: Sequence[StageProfile], assumptions: Assumptions) -> StageTimes:
    """Operations over the speed of a device; backwards in halves take 10 % longer than in one piece."""
    speed = assumptions.flops
    inputs = [stage.backward_input / speed for stage in stages]
    weights = [stage.backward_weight / speed for stage in stages]
    return StageTimes(
        forward=tuple(stage.forward / speed for stage in stages),
        backward=tuple(i + w for i, w in zip(inputs, weights, strict=True)),
        backward_input=tuple(SPLIT_SURPLUS * i for i in inputs),
        backward_weight=tuple(SPLIT_SURPLUS * w for w in weights),
        send=hop_of(stages, assumptions),
    )


def hop_of(stages: Sequence[StageProfile], assumptions: Assumptions) -> float:
    """Seconds of the largest message between two stages."""
    return assumptions.hop(max((stage.message_bytes for stage in stages[1:]), default=0))
