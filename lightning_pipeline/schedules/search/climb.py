"""Local search: what could have run in a gap is moved there, as long as that helps."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_pipeline.schedules.search.gaps import Filled, fill_gaps
from lightning_pipeline.schedules.search.problem import Orders, Problem

_AHEAD = 40
"""How far behind a gap an action may stand to be moved into it."""

_LATE = 0.7
"""The share of a gap that may pass before an action that is moved into it arrives."""


class _Move(NamedTuple):
    """Put `code` right before `before` on `rank`."""

    rank: int
    code: int
    before: int


def climb(problem: Problem, orders: Orders, patience: Sequence[float], trials: int) -> Filled | None:
    """Move actions into gaps, largest gap first, while the plan gets shorter or its actions end earlier.

    Args:
        problem: Costs and caps.
        orders: Where to start: per rank the codes of F's and I's.
        patience: By rank, as in `fill_gaps`.
        trials: How many moves to try.

    Returns:
        The best plan on the way; None if the orders themselves do not work.
    """
    best = fill_gaps(problem, orders, patience)
    tried: set[_Move] = set()
    while best is not None and len(tried) < trials:
        better = _first_better(problem, orders, best, patience, tried, trials)
        if better is None:
            return best
        orders, best = better
    return best


def _first_better(
    problem: Problem,
    orders: Orders,
    best: Filled,
    patience: Sequence[float],
    tried: set[_Move],
    trials: int,
) -> tuple[Orders, Filled] | None:
    for move in _moves(problem, best):
        if move in tried:
            continue
        if len(tried) >= trials:
            return None
        tried.add(move)
        moved = _moved(orders, move)
        filled = fill_gaps(problem, moved, patience)
        if filled is not None and _score(problem, filled) < _score(problem, best):
            return moved, filled
    return None


def _score(problem: Problem, filled: Filled) -> tuple[float, float]:
    """What to make small: the length, then the time at which actions end on average."""
    return round(filled.length(problem), 9), round(sum(filled.ends), 6)


def _moved(orders: Orders, move: _Move) -> Orders:
    changed = [code for code in orders[move.rank] if code != move.code]
    changed.insert(changed.index(move.before), move.code)
    return [*orders[: move.rank], changed, *orders[move.rank + 1 :]]


def _moves(problem: Problem, filled: Filled) -> Iterator[_Move]:
    """For each gap, largest first, the next action of each stage and kind that had arrived by then."""
    for length, begin, rank, position in sorted(_gaps(problem, filled), reverse=True):
        order = filled.orders[rank]
        before = order[position]
        seen = {before // problem.microbatches}
        for code in order[position + 1 : position + 1 + _AHEAD]:
            which = code // problem.microbatches
            if code >= 2 * problem.size or which in seen:
                continue
            seen.add(which)
            needed = problem.needs[code]
            arrival = filled.ends[needed] + problem.arrives_after[code] if needed >= 0 else 0.0
            if arrival <= begin + _LATE * length:
                yield _Move(rank, code, before)


def _gaps(problem: Problem, filled: Filled) -> Iterator[tuple[float, float, int, int]]:
    """Waits as (length, begin, rank, position of what is waited for)."""
    for rank, order in enumerate(filled.orders):
        now = 0.0
        for position, code in enumerate(order):
            if code >= 2 * problem.size:
                now += problem.duration[code]
                continue
            start = filled.ends[code] - problem.duration[code]
            if start > now + 1e-9:
                yield start - now, now, rank, position
            now = filled.ends[code]
