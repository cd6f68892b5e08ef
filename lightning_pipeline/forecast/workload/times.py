"""How long each stage takes, as worked out from its operations or as measured."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.workload.candidates import SPLIT_SURPLUS
from lightning_pipeline.forecast.workload.profile import StageProfile
from lightning_pipeline.model.trace import Work
from lightning_pipeline.schedules import Costs


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch, by stage.

    Attributes:
        forward: Of a forward.
        backward: Of a backward in one piece.
        backward_input: Of its input-gradient half, where a plan splits it.
        backward_weight: Of its weight-gradient half.
        send: Of the hop from the stage before to another device of the node.
        send_far: Of the same hop to another node.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send: tuple[float, ...]
    send_far: tuple[float, ...]

    def costs(
        self, splits_backward: bool, activation_bytes: Sequence[float], far: Collection[int] = ()
    ) -> Costs:
        """For the simulator.

        Args:
            splits_backward: Whether the plan runs backwards in two halves.
            activation_bytes: Held for one micro-batch, by stage.
            far: Stages on another node than the stage before.
        """
        halves = (self.backward_input, self.backward_weight)
        if not splits_backward:
            halves = (self.backward, (0.0,) * len(self.backward))
        send = [self.send_far[stage] if stage in far else near for stage, near in enumerate(self.send)]
        return Costs(self.forward, *halves, send=send, activation=list(activation_bytes))

    @property
    def alone(self) -> float:
        """Of one micro-batch through all stages on one device."""
        return sum(self.forward) + sum(self.backward)


def estimated(stages: Sequence[StageProfile], assumptions: Assumptions) -> StageTimes:
    """Operation by operation, by the roofline; backwards in halves take 10 % longer than in one piece."""

    def seconds(operations: Sequence[Work]) -> float:
        return sum(map(assumptions.seconds, operations))

    inputs = [seconds(stage.backward_input) for stage in stages]
    weights = [seconds(stage.backward_weight) for stage in stages]
    near, far = hops_of(stages, assumptions)
    return StageTimes(
        forward=tuple(seconds(stage.forward) for stage in stages),
        backward=tuple(i + w for i, w in zip(inputs, weights, strict=True)),
        backward_input=tuple(SPLIT_SURPLUS * i for i in inputs),
        backward_weight=tuple(SPLIT_SURPLUS * w for w in weights),
        send=near,
        send_far=far,
    )


def hops_of(
    stages: Sequence[StageProfile], assumptions: Assumptions
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each stage's message from the stage before: inside a node, and between nodes."""
    sizes = [stage.message_bytes for stage in stages]
    near = tuple(assumptions.hop(size) for size in sizes)
    return near, tuple(assumptions.hop(size, between_nodes=True) for size in sizes)
