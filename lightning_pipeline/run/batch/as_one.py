"""What a batch's report says beside what the step tells for the batch as one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from lightning_pipeline.hooks import Report
from lightning_pipeline.model.replay import Heard

_PRECISE = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-3, 1e-5)}  # relative and absolute
_ROUGH = (5e-2, 5e-2)


class Otherwise(NamedTuple):
    """A number that is another one for the batch as one.

    Attributes:
        name: That it is logged by, or of an attribute; None for the loss.
        mine: The number, put together; None for an attribute.
        theirs: That of the batch as one; None where it logs none.
        lines: At which the step reads numbers.
    """

    name: str | None
    mine: float | None
    theirs: float | None
    lines: list[str]


def told_otherwise(report: Report, runs: Callable[[], Iterator[Heard]]) -> list[Otherwise]:
    """Numbers of a report that the step does not tell for the batch as one.

    Args:
        report: Of the batch.
        runs: Runs the step for the batch as one, twice.
    """
    found: list[Otherwise] | None = None
    for one in runs():
        now = list(_differing(report, one))
        found = now if found is None else [each for each in found if _is_again(each, now)]
        if not found:
            return []
    return found or []


def _differing(report: Report, one: Heard) -> Iterator[Otherwise]:
    yield from (Otherwise(label, None, None, one.lines) for label in sorted(one.left))
    position = int(report.loss_dtype is not None)
    values = [] if report.values is None else report.values.tolist()
    dtype = report.loss_dtype
    if dtype is not None and one.loss is not None and not _is_close(values[0], one.loss, dtype):
        yield Otherwise(None, values[0], one.loss, one.lines)
    counts: Counter[str] = Counter()
    for entry in report.entries:
        nth = counts[entry.name]
        counts[entry.name] += 1
        if entry.dtype is None:
            continue
        mine, position = values[position], position + 1
        if entry.metric is not None:
            continue
        theirs = one.logged.get((entry.name, nth))
        if theirs is None or not _is_close(mine, theirs, entry.dtype):
            yield Otherwise(entry.name, mine, theirs, one.lines)


def _is_close(mine: float, theirs: float, dtype: torch.dtype) -> bool:
    if math.isnan(mine) or math.isnan(theirs):
        return math.isnan(mine) and math.isnan(theirs)
    relative, absolute = _PRECISE.get(dtype, _ROUGH)
    return math.isclose(mine, theirs, rel_tol=relative, abs_tol=absolute)


def _is_again(one: Otherwise, others: list[Otherwise]) -> bool:
    """Whether a second run says the same."""
    return any(
        other.name == one.name
        and (other.mine is None) == (one.mine is None)
        and (
            other.theirs is one.theirs
            or (None not in (one.theirs, other.theirs) and str(one.theirs) == str(other.theirs))
        )
        for other in others
    )
