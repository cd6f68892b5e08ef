"""The Zero Bubble paper's heuristic for one stage per rank: ZB-1p at 1F1B's memory, ZB-2p at twice it."""

from dataclasses import dataclass
from itertools import product

from lightning_pipeline.schedules.search.problem import Orders, Problem

_SMALL = 1e-9


@dataclass(frozen=True)
class Choices:
    """What the heuristic leaves open; all combinations are tried.

    Args:
        never_late: Warm up with as many forwards as do not delay the first backward; else one more.
        backward_first: Hold a forward back where it would delay the next backward.
        greedy: Put a W into every gap, also one that is too short for it.
    """

    never_late: bool
    backward_first: bool
    greedy: bool


def zero_bubble_orders(problem: Problem) -> list[Orders]:
    """The heuristic's orders, W's included, one for each combination of its choices that works out.

    Source:
        Qi et al. 2023, arXiv 2401.10241, section 3.1.
    """
    found = (_Heuristic(problem, Choices(*flags)).orders() for flags in product((True, False), repeat=3))
    return [orders for orders in found if orders is not None]


class _Heuristic:
    """One run: a clock, the memory, counters and the bubble so far of each rank."""

    def __init__(self, problem: Problem, choices: Choices) -> None:
        self.problem = problem
        self.choices = choices
        p = self.p = problem.num_ranks
        self.now, self.held, self.bubble = [0.0] * p, [0.0] * p, [0.0] * p
        self.done = ([0] * p, [0] * p, [0] * p)  # F, I, W
        self.end = [0.0] * (3 * problem.size)
        self.written: Orders = [[] for _ in range(p)]

    def orders(self) -> Orders | None:
        """The finished order, or None where memory does not suffice."""
        self._warm_up()
        for _ in range(1, self.problem.microbatches):
            if not self._round():
                return None
        for rank in range(self.p):
            while self._waiting(rank):
                self._put(rank, 2)
        return self.written

    def _code(self, rank: int, kind: int) -> int:
        return kind * self.problem.size + rank * self.problem.microbatches + self.done[kind][rank]

    def _arrival(self, rank: int, kind: int) -> float:
        code = self._code(rank, kind)
        needed = self.problem.needs[code] if kind < 2 else -1
        return self.end[needed] + self.problem.arrives_after[code] if needed >= 0 else 0.0

    def _put(self, rank: int, kind: int) -> None:
        code = self._code(rank, kind)
        start = max(self.now[rank], self._arrival(rank, kind))
        if self.written[rank]:
            self.bubble[rank] += start - self.now[rank]
        self.now[rank] = self.end[code] = start + self.problem.duration[code]
        self.held[rank] += self.problem.growth[code]
        self.done[kind][rank] += 1
        self.written[rank].append(code)

    def _waiting(self, rank: int) -> int:
        return self.done[1][rank] - self.done[2][rank]

    def _fits(self, rank: int) -> bool:
        return self.held[rank] + self.problem.costs.activation[rank] <= self.problem.caps[rank] + _SMALL

    def _warm_up(self) -> None:
        for rank in range(self.p):
            self._put(rank, 0)
        more = self._more_forwards()
        for rank in range(1, self.p):
            more[rank] = max(0, min(more[rank], more[rank - 1] - 1))
        for rank, count in enumerate(more):
            for _ in range(count):
                self._put(rank, 0)
        for rank in reversed(range(self.p)):
            self._put(rank, 1)

    def _more_forwards(self) -> list[int]:
        """Per rank, the forwards that fit in memory before its first backward can start."""
        problem, costs = self.problem, self.problem.costs
        more = [0] * self.p
        backward_ends = self.now[-1] + costs.backward_input[-1]
        for rank in reversed(range(self.p - 1)):
            arrival, now, held = backward_ends + problem.hop[rank], self.now[rank], self.held[rank]
            ahead = costs.forward[rank] if self.choices.never_late else 2 * _SMALL
            while (
                held + costs.activation[rank] <= problem.caps[rank] + _SMALL
                and now + ahead <= arrival + _SMALL
                and more[rank] + 1 < problem.microbatches
            ):
                now += costs.forward[rank]
                held += costs.activation[rank]
                more[rank] += 1
            backward_ends = max(now, arrival) + costs.backward_input[rank]
        return more

    def _round(self) -> bool:
        """One forward per rank, first to last, where wanted, and one backward per rank, last to first."""
        for rank, wanted in enumerate(self._wanted()):
            ahead = rank == 0 or self.done[0][rank] < self.done[0][rank - 1]
            if wanted and ahead and not self._place_forward(rank):
                return False
        for rank in reversed(range(self.p)):
            source = self.done[0][rank] if rank == self.p - 1 else self.done[1][rank + 1]
            if source <= self.done[1][rank]:
                return False
            if rank == 0 and self.done[0][0] == self.problem.microbatches:
                while self._waiting(0):
                    self._put(0, 2)
            self._place(rank, 1)
        return True

    def _wanted(self) -> list[bool]:
        forwards, m = self.done[0], self.problem.microbatches
        largest = max(self.bubble)
        wanted = [count < m for count in forwards]
        for rank in reversed(range(self.p - 1)):
            if self.choices.backward_first and wanted[rank] and forwards[rank] >= forwards[rank + 1] + 2:
                wanted[rank] = self._in_time(rank, largest)
        for rank in reversed(range(self.p - 1)):
            if wanted[rank] or forwards[rank] < m:
                behind = forwards[rank] <= forwards[rank + 1]
                wanted[rank] = behind or (wanted[rank] and (wanted[rank + 1] or forwards[rank + 1] == m))
        return wanted

    def _in_time(self, rank: int, largest: float) -> bool:
        """Whether a forward now delays no backward, or waiting for the backward would cost more."""
        costs, now = self.problem.costs, self.now[rank]
        following = self.now[rank + 1] + costs.forward[rank + 1] + costs.backward_input[rank + 1]
        following += self.problem.hop[rank]
        if now >= following:
            return False
        over = self.held[rank] + costs.activation[rank] - self.problem.caps[rank]
        kept = costs.weight_activation[rank]
        weights = -(-over // kept) if over > _SMALL and kept > 0 else 0
        if now + costs.forward[rank] + weights * costs.backward_weight[rank] <= following:
            return True
        return following - now > largest - self.bubble[rank]

    def _place_forward(self, rank: int) -> bool:
        while not self._fits(rank):
            if not self._waiting(rank):
                return False
            self._put(rank, 2)
        self._place(rank, 0)
        return True

    def _place(self, rank: int, kind: int) -> None:
        """Put W's into the wait for an action, then the action."""
        arrival, weight = self._arrival(rank, kind), self.problem.costs.backward_weight[rank]
        while self._waiting(rank) and self.now[rank] + weight <= arrival + _SMALL:
            self._put(rank, 2)
        gap = arrival - self.now[rank]
        allowed = max(self.bubble) - self.bubble[rank]
        if gap > _SMALL and self._waiting(rank) and (self.choices.greedy or gap > allowed + _SMALL):
            self._put(rank, 2)
        self._put(rank, kind)
