"""What a batch's report says beside what the step tells for the batch as one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from lightning_pipeline.hooks import Report, Write
from lightning_pipeline.model.rehearsal import Heard
from lightning_pipeline.run.batch.returned import Returned, may_differ, returned_otherwise, tolerances


class Otherwise(NamedTuple):
    """A number that is another one for the batch as one.

    Attributes:
        name: That it is logged by, or of an attribute; None for the loss.
        mine: The number, put together; None for an attribute.
        theirs: That of the batch as one; None where it logs none.
        lines: At which the step reads numbers.
        nth: How often it was logged before in the step.
    """

    name: str | None
    mine: float | None
    theirs: float | None
    lines: list[str]
    nth: int = 0


class Compared(NamedTuple):
    """What differs.

    Attributes:
        told: Numbers.
        returned: Parts of what the step returned.
        logged: What the step logs for the batch as one, if that is sure, by name and how often before.
        is_made: Whether the batch was run as one.
        is_sure: Whether its numbers are one device's.
        writes: What it gives to loggers itself, where that is sure; else None.
        has_loss: Whether its loss was compared.
        may_differ: Whether it returns what may agree in this batch by chance.
    """

    told: list[Otherwise]
    returned: list[Returned]
    logged: Mapping[tuple[str, int], float] = MappingProxyType({})
    is_made: bool = False
    is_sure: bool = False
    writes: Sequence[Write] | None = None
    has_loss: bool = False
    may_differ: bool = False


def told_otherwise(
    report: Report, output: Any, samples: int, runs: Callable[[], Iterator[Heard]], *, trains: bool
) -> Compared:
    """What a step does not tell for the batch as one.

    Args:
        report: Of the batch.
        output: What the step returned for the micro-batches, merged by our rules; None where by others.
        samples: Of the batch.
        runs: Runs the step for the batch as one, twice.
        trains: Whether it returns its loss, and hooks are given the rest.
    """
    found: Compared | None = None
    for one in runs():
        told = list(_differing(report, one))
        returned = extras_of(one.returned) if trains else one.returned
        parts = [] if output is None else list(returned_otherwise(output, returned))
        if found is not None:
            told = [each for each in found.told if _is_again(each, told)]
            parts = [each for each in found.returned if each.is_among(parts)]
        writes = (
            one.writes if one.is_sure and (found is None or _are_alike(found.writes, one.writes)) else None
        )
        found = Compared(
            told, parts, one.logged if one.is_sure else {}, is_made=True, is_sure=one.is_sure,
            writes=writes, has_loss=one.loss is not None,
            may_differ=output is not None and may_differ(returned, samples),
        )  # fmt: skip
        if not told and not parts and not one.writes:
            break
    return found or Compared([], [])


def _are_alike(one: Sequence[Write] | None, other: Sequence[Write]) -> bool:
    """Whether two runs give loggers the same, which does not go by what metrics gave."""
    return (
        one is not None
        and [call.name for call in one] == [call.name for call in other]
        and not any(
            any(returned_otherwise((mine.args, mine.kwargs), (theirs.args, theirs.kwargs)))
            for mine, theirs in zip(one, other, strict=True)
        )
    )


def extras_of(output: Any) -> Any:
    """What a training step returns beside its loss; None where it returns that alone."""
    if isinstance(output, Mapping):
        return {name: value for name, value in output.items() if name != "loss"}
    return None


def with_numbers(report: Report, numbers: Mapping[tuple[str, int], float]) -> Report:
    """A batch's report with numbers of the batch as one, by name and how often that was logged before."""
    if report.values is None or not numbers:
        return report
    values, position = report.values.clone(), int(report.loss_dtype is not None)
    counts: Counter[str] = Counter()
    for entry in report.entries:
        number = numbers.get((entry.name, counts[entry.name]))
        counts[entry.name] += 1
        if entry.dtype is not None:
            if number is not None:
                values[position] = number
            position += 1
    return replace(report, values=values)


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
            yield Otherwise(entry.name, mine, theirs, one.lines, nth)


def _is_close(mine: float, theirs: float, dtype: torch.dtype) -> bool:
    if math.isnan(mine) or math.isnan(theirs):
        return math.isnan(mine) and math.isnan(theirs)
    relative, absolute = tolerances(dtype)
    return math.isclose(mine, theirs, rel_tol=relative, abs_tol=absolute)


def _is_again(one: Otherwise, others: list[Otherwise]) -> bool:
    """Whether a second run says the same."""
    return any(
        (other.name, other.nth) == (one.name, one.nth)
        and (other.mine is None) == (one.mine is None)
        and (
            other.theirs is one.theirs
            or (None not in (one.theirs, other.theirs) and str(one.theirs) == str(other.theirs))
        )
        for other in others
    )
