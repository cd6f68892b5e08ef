"""How long each stage takes, as worked out from its operations or as measured."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from lightning_pipeline.forecast.machine import SPLIT_SURPLUS, Assumptions
from lightning_pipeline.forecast.workload.profile import StageProfile
from lightning_pipeline.model.tensors import Work
from lightning_pipeline.schedules import Action, Costs, Plan


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch, by stage.

    Attributes:
        forward: Of a forward.
        forward_split: Of one where the plan splits backwards, which takes more notes.
        backward: Of a backward in one piece.
        backward_input: Of its input-gradient half, where a plan splits it.
        backward_weight: Of its weight-gradient half.
        send: Of the hop from the stage before to another device of the node.
        send_far: Of the same hop to another node.
        pack: The part of it in which the rank that sends is busy.
        unpack: The part of it in which the rank that receives is busy.
        seen: The times of single actions behind those above, by the attribute's name and by stage; empty
            where nothing was measured.
    """

    forward: tuple[float, ...]
    forward_split: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send: tuple[float, ...]
    send_far: tuple[float, ...]
    pack: tuple[float, ...]
    unpack: tuple[float, ...]
    seen: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    def costs(
        self,
        splits_backward: bool,
        activation_bytes: Sequence[float],
        far: Collection[int] = (),
        within: Collection[int] = (),
    ) -> Costs:
        """For the simulator. What ranks do about messages is a part of the actions before and after them.

        Args:
            splits_backward: Whether the plan runs backwards in two halves.
            activation_bytes: Held for one micro-batch, by stage.
            far: Stages on another node than the stage before.
            within: Stages on the same rank as the stage before.
        """
        forward, halves = self.forward_split, (self.backward_input, self.backward_weight)
        if not splits_backward:
            forward, halves = self.forward, (self.backward, (0.0,) * len(self.backward))
        send = [self.send_far[stage] if stage in far else near for stage, near in enumerate(self.send)]
        travel = [
            max(whole - pack - unpack, 0.0)
            for whole, pack, unpack in zip(send, self.pack, self.unpack, strict=True)
        ]
        before, after = self.handling(within)
        return Costs(
            [work + more for work, more in zip(forward, before, strict=True)],
            [work + more for work, more in zip(halves[0], after, strict=True)],
            halves[1], send=travel, activation=list(activation_bytes),
        )  # fmt: skip

    def handling(self, within: Collection[int] = ()) -> tuple[list[float], list[float]]:
        """Seconds that messages add to each stage's forward and to its backward.

        Args:
            within: Stages on the same rank as the stage before.
        """
        count = len(self.forward)
        crossed = [0 < stage < count and stage not in within for stage in range(count + 1)]
        forward, backward = [], []
        for stage in range(count):
            here, there = crossed[stage], crossed[stage + 1]
            forward.append(here * self.unpack[stage] + (self.pack[stage + 1] if there else 0.0))
            backward.append(here * self.pack[stage] + (self.unpack[stage + 1] if there else 0.0))
        return forward, backward

    def drawn(self, plan: Plan, costs: Costs, dice: Random) -> dict[Action, float]:
        """How long each action of a step may take: as one that was seen, drawn for each anew.

        Ranks wait for whichever of them is later, so that a step of actions that vary takes longer than one
        of actions that all take their median.

        Args:
            plan: Of the step.
            costs: Made for it by `costs`; what they have for messages is added to what is drawn.
            dice: Draws.
        """
        of: dict[str, tuple[str, ...]] = {"F": ("forward",), "B": ("backward",)}
        if plan.splits_backward:
            of = {"F": ("forward_split",), "I": ("backward_input",), "W": ("backward_weight",)}
            of["B"] = ("backward_input", "backward_weight")
        own = costs.per_stage([1] * plan.num_stages)
        found = {}
        for action in (action for actions in plan for action in actions):
            time = own.duration(action.stage, action.kind)
            for name in of[action.kind]:
                time += dice.choice(self.seen[name][action.stage]) - getattr(self, name)[action.stage]
            found[action] = max(time, 0.0)
        return found

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
    forward = tuple(seconds(stage.forward) for stage in stages)
    return StageTimes(
        forward=forward,
        forward_split=forward,
        backward=tuple(i + w for i, w in zip(inputs, weights, strict=True)),
        backward_input=tuple(SPLIT_SURPLUS * i for i in inputs),
        backward_weight=tuple(SPLIT_SURPLUS * w for w in weights),
        **hops_of(stages, assumptions),
        seen={},
    )


def hops_of(stages: Sequence[StageProfile], assumptions: Assumptions) -> dict[str, tuple[float, ...]]:
    """What each stage's message from the stage before takes: the fields of `StageTimes` about messages."""
    sizes = [stage.message_bytes for stage in stages]
    pack, unpack = zip(*map(assumptions.handling.of, sizes), strict=True)
    return {
        "send": tuple(assumptions.hop(size) for size in sizes),
        "send_far": tuple(assumptions.hop(size, between_nodes=True) for size in sizes),
        "pack": pack,
        "unpack": unpack,
    }
