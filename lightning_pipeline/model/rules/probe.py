"""Find out how what micro-batches leave behind is put together: run the code between the units and look.

The units answer with made-up values, so that nothing is computed but glue. The step runs with one
micro-batch, with another, with one after the other, and with both joined to one batch. A rule that makes of
the first two what the last has left is the rule.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.places import MISSING, Effect, GradMode
from lightning_pipeline.model.rules.gathered import at_end
from lightning_pipeline.model.rules.made_up import Observed
from lightning_pipeline.model.rules.rows import Rows, StartRows, rows_of_each
from lightning_pipeline.model.rules.rules import (
    by_place,
    fits_by_place,
    goes_on,
    rule_for,
    same,
    unmerged,
    usual,
)
from lightning_pipeline.model.rules.runs import Arguments, Question, Runs, is_whole, values_for
from lightning_pipeline.model.rules.trial import CHAINED, Merge, Rule, Trial
from lightning_pipeline.model.rules.values import equal
from lightning_pipeline.model.rules.waiting import Wait, waiting
from lightning_pipeline.model.tensors import is_placeholder, same_values, tensors_held
from lightning_pipeline.model.trace import UnitPatches

_log = logging.getLogger(__name__)
_DRAWS = (1, 2, 3)  # seeds: a count of few draws comes out alike with one of them now and then


@dataclass(frozen=True)
class Rules:
    """What was found out about a step.

    Attributes:
        by_place: The rule for each place, by label; `CHAINED` where micro-batches have to follow each other.
        readers: Of chained places those that change what the next micro-batch computes: units that see it.
        doubted: Of chained places without a rule those that are read, where the batch as one reads something
            else.
        idle: Places that no run has changed: of these nothing is known yet, and values are put together as
            returned ones are.
        are_told: Whether the step logs what it has written in places that are worked out at the end of the
            batch, and the batch as one logs something else.
    """

    by_place: dict[str, Rule | None]
    readers: dict[str, set[int]]
    doubted: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    are_told: bool = False

    def with_idle(self, labels: set[str]) -> "Rules":
        """The same where some places were left as they were, if `same` is all that is known of them."""
        idle = frozenset(label for label in labels if self.by_place[label] is same)
        return replace(self, by_place={**self.by_place, **dict.fromkeys(idle, usual)}, idle=idle)


def rules_of(
    effects: Sequence[Effect],
    question: Question,
    function: Callable[..., Any],
    patches: UnitPatches,
    merge: Merge,
    quiet: Callable[[], AbstractContextManager[Any]],
    start: StartRows,
    aside: Sequence[Effect],
) -> Rules:
    """How what stands in each place after the micro-batches becomes what the batch leaves.

    Args:
        effects: Of the step.
        question: What to run.
        function: The user's step.
        patches: The units' `forward`.
        merge: Merges one value per micro-batch.
        quiet: Lets logs and metrics do nothing, and keeps random states.
        start: What the batch begins with and may have to be cut.
        aside: What else the step changes here, which another rank puts together.

    Raises:
        Exception: Whatever the step raises on made-up values.
    """
    run = Runs(effects, function, patches, quiet, lambda batch: start.of(question.pieces(batch)), aside)
    trials, again, observed = _trials(run, question)
    found: dict[str, Rule | None] = {}
    without = set()
    for effect in effects:
        label = effect.place.label
        own = [_trial(trial, label) for trial in trials]
        alike = all(equal(own[0].whole, drawn[label]) for drawn in again)
        if alike and all(_is_finite(trial[:4]) for trial in own):
            rule = rule_for(run.start(effect), own, merge, anew=label in run.anew or label in start.rules)
            found[label] = rule or unmerged
            if rule is None:
                without.add(label)
        else:  # random, or no numbers at all
            found[label] = unmerged if effect.deep else usual
    labels = [effect.place.label for effect in effects]
    modes = {e.place.label for e in effects if type(e.place.owner) is GradMode}  # which is on for a while
    idle = {one for one in labels if found[one] is same and _is_idle(run.start_of(one), trials, one)} - modes
    first = {one: (run.start_of(one), _trial(trials[0], one)) for one in labels}
    later = [*_later(run, question, found, first).items(), *_twice(run, question, found, first).items()]
    without |= _given_up(run, found, later, trials, merge)
    in_order = {
        label
        for label in found.keys() - idle - modes
        if all(equal(after[label], whole[label]) for (_, _, after, whole), _ in trials)
    }
    readers: dict[str, set[int]] = {}
    one, other, whole = observed
    computed = question.mended or is_whole(one, other, whole, question.sizes)
    wait = Wait(False)
    if computed and without and question.given is not None and not question.really:
        wait = waiting(run, question, without | in_order, trials[0][0][3])
    if wait.can:
        waited = {**found, **dict.fromkeys(without | in_order, at_end)}
        return Rules(waited, {}, are_told=wait.is_told).with_idle(idle)
    if without & in_order:
        found |= dict.fromkeys(in_order, CHAINED)
    if not computed:
        readers = _readers(run, question, trials[0][0][0], other, found)
        found |= dict.fromkeys(readers, CHAINED)
        doubted = {label for label in without if readers and found[label] is CHAINED}
        return Rules(found, readers, frozenset(doubted)).with_idle(idle)
    chained = {label: rule for label, rule in found.items() if rule == CHAINED}
    early = _readers(run, question, trials[0][0][0], other, chained) if chained else {}
    doubted = {*early, *(without if wait.is_read else ())}
    return Rules(found, {}, frozenset(doubted)).with_idle(idle)


def _given_up(
    run: Runs, found: dict[str, Rule | None], later: Sequence[tuple[str, tuple[Any, Trial]]],
    trials: list[Any], merge: Merge,
) -> set[str]:  # fmt: skip
    """Where a rule fitted by chance, as that of a mean of all batches does in the first of them."""
    wrong = set()
    for label, (begin, trial) in later:
        rule = found[label]
        if rule is None or goes_on(rule, begin, trial, merge):
            continue
        own = [_trial(one, label) for one in trials]
        is_written = goes_on(by_place, begin, trial, merge) and fits_by_place(run.start_of(label), own, merge)
        found[label] = by_place if is_written else unmerged
        if not is_written:
            wrong.add(label)
    return wrong


def _is_idle(start: Any, trials: list[Any], label: str) -> bool:
    """Whether nothing was left, whatever the values."""
    return all(equal(left, start) for trial in trials for left in _trial(trial, label)[:4])


def _trial(found: tuple[tuple[dict[str, Any], ...], tuple[int, int]], label: str) -> Trial:
    (one, other, after, whole), sizes = found
    return Trial(one[label], other[label], after[label], whole[label], sizes)


def _readers(
    run: Runs, question: Question, left: dict[str, Any], alone: Observed, rules: Mapping[str, Rule | None]
) -> dict[str, set[int]]:
    """Places in which what the first micro-batch left would change what the second computes.

    Where the micro-batches apart do not compute what both as one batch do, these follow each other: what
    comes out is that of gradient accumulation, as it is on one device.
    """
    _, other, _ = values_for(question, 0)
    found = {}
    for label, rule in rules.items():
        if rule is same or isinstance(rule, Rows):
            continue
        run([(question.other[0], other)], carried={label: left[label]})
        pairs = zip(run.observed, alone, strict=True)
        different = {unit for (unit, now), (_, then) in pairs if not _identical(now, then)}
        if different:
            found[label] = {unit for unit in different if unit is not None}
    return found


def _identical(now: list[Tensor], then: list[Tensor]) -> bool:
    return len(now) == len(then) and all(map(same_values, now, then))


def _trials(run: Runs, question: Question) -> tuple[list[Any], list[dict[str, Any]], list[Observed]]:
    """What is left with these values and, in the other order, with others; and once more with other draws.

    With it what the first, the second and both as one batch computed, in the first order.
    """
    trials, observed = [], []
    for seed, asked in enumerate((question, question.swapped())):
        one, other, whole = values_for(asked, seed)
        first, second = (asked.one[0], one), (asked.other[0], other)
        alone = []
        for parts in ([first], [second], [(asked.whole[0], whole)]):
            alone.append(run(parts))
            if not seed:
                observed.append(run.observed)
        if not seed:
            draws = _DRAWS if question.really else _DRAWS[:1]
            again = [run([(asked.whole[0], whole)], seed=other) for other in draws]
        trials.append(((alone[0], alone[1], run.in_order([first, second]), alone[2]), asked.sizes))
    return trials, again, observed


def _later(
    run: Runs, question: Question, rules: dict[str, Rule | None], first: Mapping[str, tuple[Any, Trial]]
) -> dict[str, tuple[Any, Trial]]:
    """What is left by a batch that comes after another one, with what that has left; nothing if none can.

    Args:
        run: Runs the step.
        question: What to run.
        rules: That were found, by label; a list whose items fit no micro-batch gets one that cuts them.
        first: What stood there before the first batch, and what that has left.
    """
    left = {label: trial.whole for label, (_, trial) in first.items()}
    carried = {
        label: left[label]
        for label, rule in rules.items()
        if rule not in (None, unmerged, usual) and not isinstance(rule, Rows) and _is_carried(left[label])
    }
    one, other, whole = values_for(question, 2)
    batches = (question.one[0], one), (question.other[0], other), (question.whole[0], whole)
    try:
        found = [run([part], carried=carried) for part in batches] if carried else [{}, {}, {}]
    except Exception as error:
        _log.debug("no batch can follow another: %s", error)
        by_rows = {label: rule for label in carried if (rule := rows_of_each(*first[label])) is not None}
        if not by_rows:
            return {}
        try:
            found = [run([part], carried=_cut(carried, by_rows, question, part[0])) for part in batches]
        except Exception as again:
            _log.debug("nor with its rows: %s", again)
            return {}
        rules.update(by_rows)
        carried = {label: value for label, value in carried.items() if label not in by_rows}
    return {
        label: (value, Trial(one_left[label], other_left[label], MISSING, whole_left[label], question.sizes))
        for one_left, other_left, whole_left in [found]
        for label, value in carried.items()
    }


def _twice(
    run: Runs, question: Question, rules: Mapping[str, Rule | None], first: Mapping[str, tuple[Any, Trial]]
) -> dict[str, tuple[Any, Trial]]:
    """What tensors are left where the second micro-batch has the samples of the first, and other values.

    Places of a memory bank that are written by numbers of the samples (`bank[index] = h`) are then the same,
    as they may be in a later batch: what each micro-batch writes fits a sum only while they are others.

    Args:
        run: Runs the step.
        question: What to run.
        rules: That were found, by label.
        first: What stood there before the first batch, and what that has left.
    """
    usual_ones = (None, same, unmerged, usual)
    labels = [
        label
        for label, (begin, _) in first.items()
        if isinstance(begin, Tensor) and begin.dim() and rules[label] not in usual_ones
        if not isinstance(rules[label], Rows)
    ]
    if not labels or question.twice is None:
        return {}
    one, other, whole = values_for(question, 4)
    try:
        parts = (question.one[0], one), (question.one[0], other), (question.twice, whole)
        found = [run([part]) for part in parts]
    except Exception as error:  # the user's code, to which samples that are there twice may be wrong
        _log.debug("no sample can be there twice: %s", error)
        return {}
    left, again, both = found
    return {
        label: (first[label][0], Trial(left[label], again[label], MISSING, both[label], question.sizes))
        for label in labels
    }


def _cut(
    carried: Mapping[str, Any], by_rows: Mapping[str, Rows], question: Question, batch: Arguments
) -> dict[str, Any]:
    """What a batch has left, with the samples of these arguments where it has samples."""
    (begin, length), *rest = question.pieces(batch)
    if rest:
        return dict(carried)
    total = sum(question.sizes)
    return {
        label: by_rows[label].cut(value, begin, length, total) if label in by_rows else value
        for label, value in carried.items()
    }


def _is_carried(value: Any) -> bool:
    """Whether a run can begin with it as it is: a number, tensors, or containers of these."""
    if isinstance(value, dict):
        return all(map(_is_carried, value.values()))
    if isinstance(value, list | tuple | deque | set):
        return all(map(_is_carried, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _is_finite(values: Sequence[Any]) -> bool:
    return all(
        bool(torch.isfinite(tensor).all())
        for value in values
        for tensor in tensors_held(value)
        if tensor.is_floating_point() and not is_placeholder(tensor)
    )
