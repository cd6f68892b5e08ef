"""Weight gradients put into the gaps of an order of forwards and input gradients."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_pipeline.schedules.search.problem import Orders, Problem


class Filled(NamedTuple):
    """An order with its weight gradients, how long it takes, and by code when each F and I ends."""

    makespan: float
    span: float
    orders: Orders
    ends: list[float]

    def length(self, problem: Problem) -> float:
        """The duration that the problem wants small."""
        return self.makespan if problem.objective == "makespan" else self.span


def fill_gaps(problem: Problem, orders: Orders, patience: Sequence[float]) -> Filled | None:
    """Time an order, with a W, oldest first, before what does not fit and in every wait that is long enough.

    Args:
        problem: Costs and caps.
        orders: Per rank the codes of its F's and I's.
        patience: By rank, the share of a W's time that a wait must last for the W to go into it. Below
            1, a W may delay what comes next.

    Returns:
        None if the ranks wait for each other or the order does not fit in the memory.
    """
    clock = _Clock(problem, patience)
    awake = list(range(problem.num_ranks))
    while awake:
        if not clock.run(awake.pop(), orders, awake):
            return None
    if any(clock.position[rank] < len(codes) for rank, codes in enumerate(orders)):
        return None
    for rank, waiting in enumerate(clock.waiting):
        clock.written[rank] += waiting[clock.first[rank] :]
        clock.now[rank] += sum(problem.duration[code] for code in waiting[clock.first[rank] :])
    span = max(now - begin for now, begin in zip(clock.now, clock.begin, strict=True))
    return Filled(max(clock.now) - min(clock.begin), span, clock.written, clock.end)


class _Clock:
    """The state of every rank: time, memory, position in its order, W's that wait and what was written."""

    def __init__(self, problem: Problem, patience: Sequence[float]) -> None:
        ranks = range(problem.num_ranks)
        self.problem = problem
        self.patience = patience
        self.end = [-1.0] * (2 * problem.size)
        self.sleepers = [-1] * (2 * problem.size)
        self.position = [0] * len(ranks)
        self.now = [0.0] * len(ranks)
        self.begin = [0.0] * len(ranks)
        self.held = [0.0] * len(ranks)
        self.waiting: Orders = [[] for _ in ranks]
        self.first = [0] * len(ranks)
        self.written: Orders = [[] for _ in ranks]

    def run(self, rank: int, orders: Orders, awake: list[int]) -> bool:
        """Go on with a rank until something it needs has no time yet; False if memory does not suffice.

        This is the search's innermost loop, so it is one function, on local names.
        """
        problem, end, sleepers = self.problem, self.end, self.sleepers
        duration, growth, size = problem.duration, problem.growth, problem.size
        needs, after, wakes = problem.needs, problem.arrives_after, problem.wakes
        order, written, waiting = orders[rank], self.written[rank], self.waiting[rank]
        position, now, held, first = self.position[rank], self.now[rank], self.held[rank], self.first[rank]
        cap, patience = problem.caps[rank] + 1e-9, self.patience[rank]
        while position < len(order):
            code = order[position]
            arrival, needed = 0.0, needs[code]
            if needed >= 0:
                if end[needed] < 0.0:
                    sleepers[needed] = rank
                    break
                arrival = end[needed] + after[code]
            while first < len(waiting):
                weight = waiting[first]
                patient = arrival - now >= patience * duration[weight] - 1e-9 and arrival > now
                if not (patient or held + growth[code] > cap):
                    break
                written.append(weight)
                now += duration[weight]
                held += growth[weight]
                first += 1
            held += growth[code]
            if held > cap:
                return False
            now = max(now, arrival)
            if position == 0:
                self.begin[rank] = now
            now += duration[code]
            end[code] = now
            written.append(code)
            if code >= size:
                waiting.append(code + size)
            if sleepers[code] >= 0:
                awake.append(wakes[code])
                sleepers[code] = -1
            position += 1
        self.position[rank], self.now[rank], self.held[rank], self.first[rank] = position, now, held, first
        return True
