"""What is to be planned, with every action as one number so that the search is quick."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lightning_pipeline.schedules.plans import Action, Plan, StageCosts

_KINDS = ("F", "I", "W")

Orders = list[list[int]]
"""Per rank, the codes of its actions in order. See `Problem`."""


@dataclass(frozen=True)
class Problem:
    """A placement of stages on ranks, micro-batches, costs and memory.

    An action's code is `kind * size + stage * microbatches + microbatch`, where `size` is stages times
    micro-batches and kind is 0 for F, 1 for I, 2 for W. The tables below are by code.

    Args:
        placement: The rank of each stage.
        microbatches: Micro-batches per batch.
        costs: Of each stage.
        caps: By rank, the memory that may be held.
        objective: `makespan` or `span`.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: StageCosts
    caps: tuple[float, ...]
    objective: str = "makespan"

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.caps)

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return len(self.placement)

    @cached_property
    def is_loop(self) -> bool:
        """Whether rank r holds stages r, r + p, r + 2p and so on."""
        return all(rank == stage % self.num_ranks for stage, rank in enumerate(self.placement))

    @cached_property
    def size(self) -> int:
        """Stages times micro-batches: how many actions there are of each kind."""
        return self.num_stages * self.microbatches

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """By rank, its stages, ascending."""
        stages = range(self.num_stages)
        return tuple(tuple(s for s in stages if self.placement[s] == rank) for rank in range(self.num_ranks))

    @cached_property
    def shares(self) -> list[float]:
        """By rank, the activations of one micro-batch on all its stages."""
        return [sum(self.costs.activation[stage] for stage in stages) for stages in self.local]

    @cached_property
    def hop(self) -> list[float]:
        """By stage, the latency of the hop to the next stage."""
        places = (*self.placement, self.placement[-1])
        sends = (*self.costs.send[1:], 0.0)
        return [send if a != b else 0.0 for send, (a, b) in zip(sends, pairwise(places), strict=True)]

    @cached_property
    def duration(self) -> list[float]:
        """By code, the time of an action."""
        times = (self.costs.forward, self.costs.backward_input, self.costs.backward_weight)
        return [time for kind in times for time in kind for _ in range(self.microbatches)]

    @cached_property
    def growth(self) -> list[float]:
        """By code, what an action adds to its rank's memory."""
        stages, each = range(self.num_stages), range(self.microbatches)
        return [self.costs.growth(s, kind) for kind in _KINDS for s in stages for _ in each]

    @cached_property
    def needs(self) -> list[int]:
        """By code of F and I, the code of the result that arrives for it; -1 for a part of the batch."""
        m, size = self.microbatches, self.size
        forwards = [code - m if code >= m else -1 for code in range(size)]
        inputs = [code + m if code + m < 2 * size else code - size for code in range(size, 2 * size)]
        return forwards + inputs

    @cached_property
    def arrives_after(self) -> list[float]:
        """By code of F and I, the latency of the hop that brings what it needs."""
        m = self.microbatches
        forwards = [0.0, *self.hop[:-1]]
        return [time for hops in (forwards, self.hop) for time in hops for _ in range(m)]

    @cached_property
    def wakes(self) -> list[int]:
        """By code of F and I, the rank to which its result goes."""
        m, place = self.microbatches, self.placement
        forwards, inputs = (*place[1:], place[-1]), (place[0], *place[:-1])
        return [rank for ranks in (forwards, inputs) for rank in ranks for _ in range(m)]

    def code(self, action: Action) -> int:
        """The number of an action; a full backward counts as an I."""
        kind = 0 if action.kind == "F" else 2 if action.kind == "W" else 1
        return kind * self.size + action.stage * self.microbatches + action.microbatch

    def plan(self, orders: Orders) -> Plan:
        """The plan that these orders of codes, W's included, stand for."""
        return Plan([self._action(code) for code in codes] for codes in orders)

    def _action(self, code: int) -> Action:
        kind, rest = divmod(code, self.size)
        stage, microbatch = divmod(rest, self.microbatches)
        return Action(stage, _KINDS[kind], microbatch)

    def without_weights(self, ranks: Iterable[Sequence[Action]]) -> Orders:
        """The order of forwards and backwards in a plan, as codes."""
        return [[self.code(action) for action in actions if action.kind != "W"] for actions in ranks]
