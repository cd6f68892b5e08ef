"""What actions cost: time, hops between ranks, and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipeline.errors import ConfigurationError

Amount = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times and memory of a model's parts, in any units, for one micro-batch.

    A number is one rank's whole share of the model: with v stages per rank, each costs 1/v of it. A
    sequence gives each stage its own.

    Args:
        forward: Time of a forward.
        backward_input: Time of the input-gradient half of a backward. A full backward costs both halves.
        backward_weight: Time of the weight-gradient half.
        send: Latency of one hop between ranks: one number, or for each stage that of the hop from the stage
            before it, the first of which counts for nothing. Occupies no rank; a hop within a rank is free.
        activation: Memory held from F to B or I.
        weight_activation: The part of `activation`, in the same unit, that stays until W when the
            backward is split. None: all of it.

    Raises:
        ConfigurationError: A value is negative, a sequence has another length than the others, or
            `weight_activation` is more than `activation`. Lists everything that is wrong.

    Example:
        >>> Costs(1, 1, 1).per_stage([2, 2, 2, 2]).forward
        (0.5, 0.5, 0.5, 0.5)
    """

    forward: Amount
    backward_input: Amount
    backward_weight: Amount
    send: Amount = 0.0
    activation: Amount = 1.0
    weight_activation: Amount | None = None

    def __init__(
        self,
        forward: Amount,
        backward_input: Amount,
        backward_weight: Amount,
        *,
        send: Amount = 0.0,
        activation: Amount = 1.0,
        weight_activation: Amount | None = None,
    ) -> None:
        given = {
            "forward": forward,
            "backward_input": backward_input,
            "backward_weight": backward_weight,
            "send": send,
            "activation": activation,
            "weight_activation": weight_activation,
        }
        for name, value in given.items():
            frozen = tuple(map(float, value)) if isinstance(value, Sequence) else value
            object.__setattr__(self, name, frozen)
        self._refuse_nonsense()

    def _refuse_nonsense(self) -> None:
        amounts = {name: value for name, value in vars(self).items() if value is not None}
        problems = [
            f"{name}={value} has a negative time or size"
            for name, value in amounts.items()
            if not min(value if isinstance(value, tuple) else (value,), default=-1.0) >= 0
        ]
        lengths = {name: len(value) for name, value in amounts.items() if isinstance(value, tuple)}
        if len(set(lengths.values())) > 1:
            problems.append(f"sequences give a value for each stage, but their lengths differ: {lengths}")
        if not problems and self.weight_activation is not None:
            stages = range(self.num_stages or 1)
            if any(_at(self.weight_activation, s) > _at(self.activation, s) for s in stages):
                problems.append("weight_activation is a part of activation and cannot be more than it")
        if problems:
            raise ConfigurationError("; ".join(problems))

    @property
    def num_stages(self) -> int | None:
        """Stages that the sequences are for; None when all costs are numbers."""
        amounts = [value for value in vars(self).values() if isinstance(value, tuple)]
        return len(amounts[0]) if amounts else None

    def per_stage(self, stages_per_rank: Sequence[int]) -> "StageCosts":
        """Work out each stage's own costs.

        Args:
            stages_per_rank: For each stage, how many stages its rank holds.

        Raises:
            ConfigurationError: The costs are given for another number of stages.
        """
        if self.num_stages not in (None, len(stages_per_rank)):
            raise ConfigurationError(
                f"costs are given for {self.num_stages} stages, but the plan has {len(stages_per_rank)}: "
                f"give as many, or numbers, which are shared out"
            )

        def share(value: Amount) -> tuple[float, ...]:
            return tuple(
                value[stage] if isinstance(value, Sequence) else value / count
                for stage, count in enumerate(stages_per_rank)
            )

        kept = self.activation if self.weight_activation is None else self.weight_activation
        return StageCosts(
            share(self.forward),
            share(self.backward_input),
            share(self.backward_weight),
            tuple(_at(self.send, stage) for stage in range(len(stages_per_rank))),
            share(self.activation),
            share(kept),
        )


def _at(value: Amount, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value


@dataclass(frozen=True)
class StageCosts:
    """Costs of each stage: times, latency of the hop from the one before, memory held until I and until W."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send: tuple[float, ...]
    activation: tuple[float, ...]
    weight_activation: tuple[float, ...]

    def duration(self, stage: int, kind: str) -> float:
        """Time of an action of this kind on this stage."""
        if kind == "F":
            return self.forward[stage]
        if kind == "I":
            return self.backward_input[stage]
        if kind == "W":
            return self.backward_weight[stage]
        return self.backward_input[stage] + self.backward_weight[stage]

    def growth(self, stage: int, kind: str) -> float:
        """What an action of this kind adds to the memory held, negative if it frees."""
        if kind == "F":
            return self.activation[stage]
        if kind == "I":
            return self.weight_activation[stage] - self.activation[stage]
        if kind == "W":
            return -self.weight_activation[stage]
        return -self.activation[stage]
