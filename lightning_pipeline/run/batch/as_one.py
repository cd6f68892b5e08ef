"""What a batch's report says beside what the step tells for the batch as one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.hooks import Report
from lightning_pipeline.model.rehearsal import Heard

_PRECISE = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-3, 1e-5)}  # relative and absolute
_ROUGH = (5e-2, 5e-2)


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


class Returned(NamedTuple):
    """A part of what a step returned that is another one for the batch as one.

    Attributes:
        name: Where it stands.
        mine: What was put together, in words.
        theirs: What the batch as one has, in words.
    """

    name: str
    mine: str
    theirs: str


class Compared(NamedTuple):
    """What differs.

    Attributes:
        told: Numbers.
        returned: Rows of samples that the step returned.
        logged: What the step logs for the batch as one, if that is sure, by name and how often before.
        is_made: Whether the batch was run as one.
        is_sure: Whether its numbers are one device's.
    """

    told: list[Otherwise]
    returned: list[Returned]
    logged: Mapping[tuple[str, int], float] = MappingProxyType({})
    is_made: bool = False
    is_sure: bool = False


def told_otherwise(
    report: Report, output: Any, samples: int | None, runs: Callable[[], Iterator[Heard]]
) -> Compared:
    """What a step does not tell for the batch as one.

    Args:
        report: Of the batch.
        output: What the step returned for the micro-batches, merged by our rules; None where by others.
        samples: Of the batch.
        runs: Runs the step for the batch as one, twice.
    """
    found: Compared | None = None
    for one in runs():
        told, rows = list(_differing(report, one)), list(_rows(output, one.returned, "", samples))
        if found is not None:
            told = [each for each in found.told if _is_again(each, told)]
            rows = [each for each in found.returned if each in rows]
        logged = one.logged if one.is_sure else {}
        found = Compared(told, rows, logged, is_made=True, is_sure=one.is_sure)
        if not told and not rows:
            break
    return found or Compared([], [])


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


def _rows(mine: Any, theirs: Any, where: str, samples: int | None) -> Iterator[Returned]:
    """Rows that differ; a number of the batch, such as a loss, is the mean over samples by our rules."""
    mine, theirs = _as_tensor(mine, samples), _as_tensor(theirs, samples)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        yield from _other_rows(mine, theirs, where, samples)
    elif isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in mine:
            if key in theirs:
                yield from _rows(mine[key], theirs[key], f"{where}[{key!r}]", samples)
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            yield Returned(where, f"{len(mine)} items", f"{len(theirs)} items")
        for number, pair in enumerate(zip(mine, theirs, strict=False)):
            yield from _rows(*pair, f"{where}[{number}]", samples)


def _as_tensor(value: Any, samples: int | None) -> Any:
    """The same where it is an array, or a list with a number for each sample."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.as_tensor(value)
    numbers = isinstance(value, list) and len(value) == samples
    if numbers and all(type(one) in (bool, int, float) for one in value):
        return torch.tensor(value)
    return value


def _other_rows(mine: Tensor, theirs: Tensor, where: str, samples: int | None) -> Iterator[Returned]:
    if mine.shape != theirs.shape:
        if mine.dim() and theirs.dim():
            yield Returned(where, f"shape {tuple(mine.shape)}", f"shape {tuple(theirs.shape)}")
        return
    if not mine.numel() or not mine.dim() or len(mine) != samples or mine.is_complex():
        return
    relative, absolute = _PRECISE.get(mine.dtype, _ROUGH) if mine.is_floating_point() else (0.0, 0.0)
    ours, other = mine.double().flatten(), theirs.to(mine.device).double().flatten()
    finite = other[other.isfinite()]
    bound = absolute + relative * (float(finite.abs().max()) if finite.numel() else 0.0)
    away = (ours - other).abs()
    away = torch.where((ours == other) | (ours.isnan() & other.isnan()), 0.0, away.nan_to_num(nan=math.inf))
    worst = int(away.argmax())
    if float(away[worst]) > bound:
        yield Returned(where, f"{float(ours[worst]):.6g}", f"{float(other[worst]):.6g}")


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
    relative, absolute = _PRECISE.get(dtype, _ROUGH)
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
