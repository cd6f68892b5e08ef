"""Orders by list scheduling: whatever is ready and most wanted goes first, with a way out kept free."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pipeline.schedules.search.problem import Orders, Problem

_SMALL = 1e-9

Key = Callable[[int, int], tuple[int, ...]]

FORWARD_KEYS: dict[str, Callable[[int], Key]] = {
    "rounds": lambda p: lambda stage, i: (i // p, stage, i),
    "late stages": lambda p: lambda stage, i: (-stage, i),
}
BACKWARD_KEYS: dict[str, Callable[[int], Key]] = {
    "rounds": lambda p: lambda stage, i: (i // p, -stage, i),
    "late stages": lambda p: lambda stage, i: (-stage, i),
    "early stages": lambda p: lambda stage, i: (stage, i),
}


@dataclass(frozen=True)
class Taste:
    """What goes first where several actions are ready.

    Args:
        forward: Which forward, a key of `FORWARD_KEYS`.
        backward: Which backward, a key of `BACKWARD_KEYS`.
        first: `F`, `I`, or `turns` for one after the other.
    """

    forward: str
    backward: str
    first: str


TASTES = tuple(
    Taste(forward, backward, first)
    for first in ("turns", "I", "F")
    for forward in ("late stages", "rounds")
    for backward in ("rounds", "early stages", "late stages")
)
"""All of them, those first that did best on random costs."""


def list_order(problem: Problem, taste: Taste) -> Orders | None:
    """Order forwards and backwards by what is ready first.

    A forward must leave room for one micro-batch in each later stage of its rank. So the last stage can
    always go on, then the one before it, and so on: the order cannot lock up, whatever the memory.

    Args:
        problem: Costs and caps.
        taste: What goes first.

    Returns:
        The codes of F's and I's, or None if a rank's memory does not hold one micro-batch.
    """
    return _Lists(problem, taste).orders()


class _Ready(NamedTuple):
    key: tuple[int, ...]
    code: int


class _Lists:
    """The state of every rank while time goes on."""

    def __init__(self, problem: Problem, taste: Taste) -> None:
        p = problem.num_ranks
        self.problem = problem
        self.first = taste.first
        self.keys = (FORWARD_KEYS[taste.forward](p), BACKWARD_KEYS[taste.backward](p))
        self.arrival: list[float | None] = [None] * (2 * problem.size)
        self.arrival[: problem.microbatches] = [0.0] * problem.microbatches
        self.done = [[0] * problem.num_stages, [0] * problem.num_stages]
        self.now, self.held = [0.0] * p, [0.0] * p
        self.weights: Orders = [[] for _ in range(p)]
        self.written: Orders = [[] for _ in range(p)]
        self.last_kind = [1] * p
        self.reserve = [
            sum(problem.costs.activation[s] for s in problem.local[rank] if s > stage)
            for stage, rank in enumerate(problem.placement)
        ]

    def orders(self) -> Orders | None:
        """Run until nothing is left."""
        events = [(0.0, rank) for rank in range(self.problem.num_ranks)]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.now[rank]:
                continue
            wake = self._step(now, rank)
            for event in wake:
                heapq.heappush(events, event)
        total = sum(len(order) for order in self.written)
        return self.written if total == 2 * self.problem.size else None

    def _step(self, now: float, rank: int) -> list[tuple[float, int]]:
        """Do one thing on a rank; the (time, rank) pairs to look at next."""
        forward, backward, soonest, full = self._ready(now, rank)
        chosen = self._choose(forward, backward, rank)
        if chosen is not None:
            return self._do(now, rank, chosen.code)
        weights = self.weights[rank]
        if weights and (full or soonest - now >= self.problem.duration[weights[0]] - _SMALL):
            return self._do(now, rank, weights.pop(0))
        return [(soonest, rank)] if soonest < float("inf") else []

    def _ready(self, now: float, rank: int) -> tuple[_Ready | None, _Ready | None, float, bool]:
        """The best forward and backward, when the next one arrives, whether a forward waits for memory."""
        problem, soonest, full = self.problem, float("inf"), False
        best: list[_Ready | None] = [None, None]
        for stage in problem.local[rank]:
            for kind in (0, 1):
                i = self.done[kind][stage]
                if i == problem.microbatches:
                    continue
                code = kind * problem.size + stage * problem.microbatches + i
                arrival = self.arrival[code]
                if arrival is None:
                    continue
                room = problem.caps[rank] - self.held[rank] - self.reserve[stage]
                if arrival > now + _SMALL:
                    soonest = min(soonest, arrival)
                elif kind == 0 and problem.costs.activation[stage] > room + _SMALL:
                    full = True
                else:
                    ready, other = _Ready(self.keys[kind](stage, i), code), best[kind]
                    best[kind] = ready if other is None or ready < other else other
        return best[0], best[1], soonest, full

    def _choose(self, forward: _Ready | None, backward: _Ready | None, rank: int) -> _Ready | None:
        if forward is None or backward is None:
            return forward or backward
        if self.first == "turns":
            return forward if self.last_kind[rank] else backward
        return forward if self.first == "F" else backward

    def _do(self, now: float, rank: int, code: int) -> list[tuple[float, int]]:
        problem = self.problem
        end = now + problem.duration[code]
        self.now[rank] = end
        self.held[rank] += problem.growth[code]
        kind, rest = divmod(code, problem.size)
        stage = rest // problem.microbatches
        if kind == 2:
            return [(end, rank)]
        self.last_kind[rank] = kind
        self.done[kind][stage] += 1
        self.written[rank].append(code)
        if kind == 1:
            self.weights[rank].append(code + problem.size)
        follower = self._follower(kind, stage, code)
        if follower < 0:
            return [(end, rank)]
        self.arrival[follower] = end + problem.arrives_after[follower]
        peer = problem.wakes[code]
        return [(end, rank), (max(now, self.now[peer]), peer)] if peer != rank else [(end, rank)]

    def _follower(self, kind: int, stage: int, code: int) -> int:
        """The code of what a result goes to; -1 for none."""
        last = stage == self.problem.num_stages - 1
        if kind == 0:
            return code + (self.problem.size if last else self.problem.microbatches)
        return code - self.problem.microbatches if stage else -1
