"""What a batch's report says beside what the step tells for the batch as one."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.hooks import Entry, Report, Write
from lightning_pipeline.model.rehearsal import Heard
from lightning_pipeline.run.batch.differences import (
    Difference,
    MergeFailure,
    differences,
    tolerances,
    with_parts,
)
from lightning_pipeline.run.batch.returned import may_differ


class Otherwise(NamedTuple):
    """A number that is another one for the batch as one.

    Attributes:
        name: That it is logged by; None for the loss.
        mine: The number, put together.
        theirs: That of the batch as one; None where it logs none.
        lines: At which the step reads numbers.
        nth: How often it was logged before in the step.
        is_unknown: Whether the batch as one logs a value that is not here.
    """

    name: str | None
    mine: float
    theirs: float | None
    lines: list[str]
    nth: int = 0
    is_unknown: bool = False


class Compared(NamedTuple):
    """What differs.

    Attributes:
        told: Numbers.
        returned: Parts of what the step returned.
        left: Parts of what it left behind, of which the first key is the label.
        left_as_one: What the batch as one leaves, by label, where that is not the very same.
        logged: What the step logs for the batch as one, if that is sure, by name and how often before.
        writes: What it gives to loggers itself, where that is sure; else None.
        is_made: Whether the batch was run as one.
        is_sure: Whether its numbers are one device's.
        has_loss: Whether its loss was compared.
        may_differ: Whether it returns what may agree in this batch by chance.
        is_none: Whether it returns nothing.
        batch_sizes: Of how many samples it says that numbers are, likewise, if that is sure.
        more: What no micro-batch has logged: name, number, arguments of the call; None of what is not here.
        compared: Labels of what it leaves behind and what was compared with that of the micro-batches.
    """

    told: Sequence[Otherwise] = ()
    returned: Sequence[Difference] = ()
    left: Sequence[Difference] = ()
    left_as_one: Mapping[str, Any] = MappingProxyType({})
    logged: Mapping[tuple[str, int], float] = MappingProxyType({})
    writes: Sequence[Write] | None = None
    is_made: bool = False
    is_sure: bool = False
    has_loss: bool = False
    may_differ: bool = False
    is_none: bool = False
    batch_sizes: Mapping[tuple[str, int], int] = MappingProxyType({})
    more: Sequence[tuple[str, Any, Any]] = ()
    compared: Collection[str] = ()

    @property
    def differs(self) -> bool:
        """Whether anything does, or goes to loggers, so that it may go by what metrics gave."""
        told = self.told or self.more
        return bool(told or self.returned or self.left or self.left_as_one or self.writes)

    def replaces(self, output: Any) -> bool:
        """Whether what the batch as one returns stands for what no rule puts together; that is warned of."""
        return self.is_made and isinstance(output, MergeFailure)

    def into(self, output: Any) -> Any:
        """What the step returned, with what the batch as one has otherwise, where that is sure."""
        return with_parts(output, self.returned) if self.is_sure or self.replaces(output) else output

    def if_again(self, other: "Compared") -> "Compared":
        """The same, as far as a run with other values of metrics agrees."""
        left_as_one = {
            label: value
            for label, value in self.left_as_one.items()
            if label in other.left_as_one and not any(differences(value, other.left_as_one[label]))
        }
        return self._replace(
            told=[one for one in self.told if _is_again(one, other.told)],
            returned=[one for one in self.returned if one.is_among(other.returned)],
            left=[one for one in self.left if one.is_among(other.left)],
            left_as_one=left_as_one,
            compared=set(self.compared) - (self.left_as_one.keys() - left_as_one.keys()),
            logged={
                key: number
                for key, number in self.logged.items()
                if key in other.logged and not any(differences(number, other.logged[key]))
            },
            writes=self.writes if _are_alike(self.writes, other.writes or ()) else None,
            more=[one if _is_logged_again(one, other.more) else (one[0], None, None) for one in self.more],
        )


def told_otherwise(
    report: Report,
    output: Any,
    left: Mapping[str, Any],
    samples: int,
    runs: Callable[[], Iterator[Heard]],
    *,
    trains: bool,
    is_filled: Callable[[], bool] = lambda: False,
    twice: Callable[[], bool] = lambda: False,
) -> Compared:
    """What a step does not tell for the batch as one.

    Args:
        report: Of the batch.
        output: What the step returned for the micro-batches, merged by our rules; None where by others.
        left: What it left behind for them, by label.
        samples: Of the batch.
        runs: Runs the step for the batch as one, twice.
        trains: Whether it returns its loss, and hooks are given the rest.
        is_filled: Whether values were made up for the runs, so that each has to tell the same.
        twice: Asked after the first: whether both are made where that tells nothing else.

    Returns:
        Nothing that differs where that follows from values that were made up.
    """
    found: Compared | None = None
    for one in runs():
        returned = extras_of(one.returned) if trains else one.returned
        here = _compared(report, output, left, one, returned)
        here = here._replace(may_differ=output is not None and may_differ(returned, samples))
        found = here if found is None or is_filled() else found.if_again(here)
        if found.differs and is_filled():
            return Compared()
        if not (found.differs or is_filled() or twice()):
            break
    return found or Compared()


def _compared(report: Report, output: Any, left: Mapping[str, Any], one: Heard, returned: Any) -> Compared:
    """What differs in one run of the step for the batch as one."""
    mine = {label: left[label] for label in left if label in one.left}
    theirs = {label: one.left[label] for label in mine}
    others = {each.place[0] for each in differences(mine, theirs, exactly=True)}
    return Compared(
        list(_differing(report, one)),
        [] if output is None else list(differences(output, returned)),
        list(differences(mine, theirs)),
        {label: theirs[label] for label in others},
        one.logged if one.is_sure else {},
        one.writes if one.is_sure else None,
        is_made=True,
        is_sure=one.is_sure,
        has_loss=one.loss is not None,
        is_none=one.returned is None,
        batch_sizes=one.batch_sizes if one.is_sure else {},
        more=list(_logged_beside(report, one)),
        compared=mine.keys(),
    )


def _logged_beside(report: Report, one: Heard) -> Iterator[tuple[str, Any, Any]]:
    """What the batch as one logs more often than its micro-batches."""
    counts = Counter(entry.name for entry in report.entries)
    for (name, nth), (value, given) in one.calls.items():
        if nth >= counts[name]:
            yield name, value, given
    for name, nth in one.unknown:
        if nth >= counts[name]:
            yield name, None, None


def with_more(report: Report, more: Sequence[tuple[Entry, Tensor]]) -> Report:
    """A batch's report with further logs.

    Args:
        report: Of the batch.
        more: Each with its number.
    """
    if not more:
        return report
    before = report.values if report.values is not None else torch.zeros(0, dtype=torch.float64)
    place = len(before) - report.scales
    new = torch.stack([number.to(before) for _, number in more])
    values = torch.cat([before[:place], new, before[place:]])
    return replace(report, entries=(*report.entries, *(entry for entry, _ in more)), values=values)


def _is_logged_again(one: tuple[str, Any, Any], others: Sequence[tuple[str, Any, Any]]) -> bool:
    """Whether a second run logs the same number, which does not go by what metrics gave."""
    return any(one[0] == name and not any(differences(one[1], value)) for name, value, _ in others)


def _are_alike(one: Sequence[Write] | None, other: Sequence[Write]) -> bool:
    """Whether two runs give loggers the same, which does not go by what metrics gave."""
    return (
        one is not None
        and [call.name for call in one] == [call.name for call in other]
        and not any(
            any(differences((mine.args, mine.kwargs), (theirs.args, theirs.kwargs)))
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


def with_batch_sizes(report: Report, sizes: Mapping[tuple[str, int], int]) -> Report:
    """A batch's report with what the batch as one says of how many samples its numbers are."""
    counts, entries = Counter[str](), []
    for entry in report.entries:
        known = sizes.get((entry.name, counts[entry.name]))
        counts[entry.name] += 1
        differs = entry.batch_size is not None and known is not None and known != entry.batch_size
        entries.append(replace(entry, batch_size=known) if differs else entry)
    return replace(report, entries=tuple(entries)) if entries != list(report.entries) else report


def _differing(report: Report, one: Heard) -> Iterator[Otherwise]:
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
            is_unknown = (entry.name, nth) in one.unknown
            yield Otherwise(entry.name, mine, theirs, one.lines, nth, is_unknown=is_unknown)


def _is_close(mine: float, theirs: float, dtype: torch.dtype) -> bool:
    if math.isnan(mine) or math.isnan(theirs):
        return math.isnan(mine) and math.isnan(theirs)
    relative, absolute = tolerances(dtype)
    return math.isclose(mine, theirs, rel_tol=relative, abs_tol=absolute)


def _is_again(one: Otherwise, others: Sequence[Otherwise]) -> bool:
    """Whether a second run says the same."""
    return any(
        (other.name, other.nth) == (one.name, one.nth)
        and (
            other.theirs is one.theirs
            or (None not in (one.theirs, other.theirs) and str(one.theirs) == str(other.theirs))
        )
        for other in others
    )
