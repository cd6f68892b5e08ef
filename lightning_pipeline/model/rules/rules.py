"""How what the micro-batches of a batch left in a place becomes what the batch as a whole would have left.

Every micro-batch begins with what stood there when the batch began. Which rule puts the results together is
not guessed: `rule_for` tries them on a run in which the answer is known.
"""

from collections import deque
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.model.places import MISSING
from lightning_pipeline.model.rules.rows import rows_in
from lightning_pipeline.model.rules.trial import Merge, NoFit, Rule, Trial
from lightning_pipeline.model.rules.values import equal, is_number
from lightning_pipeline.model.tensors import dict_like, is_placeholder, joined_in_blocks, tensors_in


def same(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """All leave the same, such as a counter of batches or a mask made once."""
    return results[-1]


def first(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """What the first samples of the batch give."""
    return results[0]


def merged(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """As returned values are merged: means by samples, samples joined."""
    try:
        return merge(list(results), list(sizes))
    except (ConfigurationError, TypeError, RuntimeError) as error:
        raise NoFit from error


def averaged(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """The mean by samples of each element, such as a moving average of a mean."""
    if not _are_tensors(results[0], results) or not results[0].is_floating_point():
        raise NoFit
    weighted = [result * size for result, size in zip(results, sizes, strict=True)]
    return torch.stack(weighted).sum(0) / sum(sizes)


def summed(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """Sums over samples: what each has added is added up, to 0 where nothing was there, as in a `Counter`."""
    start = 0 if start is MISSING and all(map(is_number, results)) else start
    if _are_tensors(start, results):
        return start + torch.stack([result - start for result in results]).sum(0).to(start.dtype)
    if not all(is_number(value) for value in (start, *results)):
        raise NoFit
    return start + sum(result - start for result in results)


def added(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """Sums over samples that begin with the batch, such as a count of its samples."""
    if not all(is_number(value) or (isinstance(value, Tensor) and not value.dim()) for value in results):
        raise NoFit
    return sum(results[1:], results[0])


def largest(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """The largest that was seen."""
    return _extreme(results, torch.maximum, max)


def smallest(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """The smallest that was seen."""
    return _extreme(results, torch.minimum, min)


def joined(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """All items that were added, in order."""
    if isinstance(start, set):
        return start.union(*_of_type(results, set))
    return _with(start, [item for new in _new_items(start, results) for item in new])


def one_by_one(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """As many items as one micro-batch has added, each merged."""
    new = _new_items(start, results)
    if len({len(items) for items in new}) != 1:
        raise NoFit
    columns = zip(*new, strict=True)
    return _with(start, [merged(None, list(column), sizes, merge) for column in columns])


def alike_one_by_one(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """The same where all have added the same, as zeros while a weight is 0; later they may be others."""

    def put_together(values: list[Any], sizes: list[int]) -> Any:
        alike = all(equal(value, values[0]) for value in values)
        return values[0] if alike else usual(None, values, sizes, merge)

    return one_by_one(start, results, sizes, put_together)


def averaged_one_by_one(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """The same of items that are means of each element."""
    return one_by_one(start, results, sizes, lambda values, sizes: averaged(None, values, sizes, merge))


class OfWindow:
    """What is added to a deque that lets go of as much: once it is full, it does not tell how much that is.

    Args:
        rule: For what is added.
        count: How many items a micro-batch adds.
        by_samples: Whether that is for each of its samples.
    """

    def __init__(self, rule: Rule, count: int, *, by_samples: bool) -> None:
        self._rule, self._count, self._by_samples = rule, count, by_samples

    def __call__(self, start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
        counts = [self._count * (size if self._by_samples else 1) for size in sizes]
        return _with(start, list(self._rule([], _new_items(start, results, counts), sizes, merge)))


class InBlocks:
    """Rows that have each sample several times, all samples one after the other, as joined views have.

    Args:
        blocks: How often.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def __call__(self, start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
        if not all(isinstance(result, Tensor) and result.dim() for result in results):
            raise NoFit
        times, rest = divmod(len(results[0]), sizes[0])
        lengths = [times * size for size in sizes]
        if rest or times % self._blocks or [len(result) for result in results] != lengths:
            raise NoFit
        return joined_in_blocks(results, 0, self._blocks)

    def of_items(self, start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
        """The same of each item that was added to a list."""
        return one_by_one(start, results, sizes, lambda values, sizes: self(None, values, sizes, merge))


def by_place(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """Entries that each has written, as of its samples in a table; of those of several what the last has."""
    if not _are_tensors(start, results) or not start.dim():
        raise NoFit
    whole = start
    for result in results:
        whole = torch.where(result != start, result, whole)
    return whole


class ByKey:
    """Each entry of a dictionary by a rule of its own.

    Args:
        rules: By key.
    """

    def __init__(self, rules: dict[Any, Rule]) -> None:
        self._rules = rules

    def __call__(self, start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
        before = start if isinstance(start, dict) else {}
        _of_type(results, dict)
        found: dict[Any, Any] = {}
        for key in dict.fromkeys(key for result in results for key in result):
            values = _with_none_added([result.get(key, MISSING) for result in results])
            rule = self._rules.get(key, usual)
            if all(value is before.get(key, MISSING) for value in values):
                found[key] = values[0]
            elif any(value is MISSING for value in values):
                raise NoFit
            else:
                found[key] = rule(_begun(before.get(key, MISSING), values), values, sizes, merge)
        return dict_like(results[0], found)


def usual(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """Where nothing is known: as returned values are merged; what was added to a container likewise.

    What stands for a value of another stage is none to compare.
    """
    if all(map(is_placeholder, results)):
        return results[-1]
    if all(equal(result, results[0]) for result in results) and not is_number(results[0]):
        return results[0]
    if isinstance(start, bool) and all(isinstance(result, bool) for result in results):
        return flipped(start, results, sizes, merge)
    if isinstance(start, dict) and not all(callable(v) for result in results for v in result.values()):
        return ByKey({})(start, results, sizes, merge)
    if isinstance(start, dict):
        return results[-1]
    if isinstance(start, list | deque):
        of_samples = [len(result) - len(start) for result in results] == list(sizes) and max(sizes) > 1
        return (joined if of_samples else one_by_one)(start, results, sizes, merge)
    if isinstance(start, set):
        return joined(start, results, sizes, merge)
    if all(isinstance(value, int) and not isinstance(value, bool) for value in (start, *results)):
        steps = [result - start for result in results]
        counts_samples = steps == list(sizes) or len(set(steps)) > 1
        return summed(start, results, sizes, merge) if counts_samples else results[0]
    return merged(start, results, sizes, merge)


def flipped(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """A flag that is set for some samples, such as one that asks to stop."""
    if not all(isinstance(value, bool) for value in (start, *results)):
        raise NoFit
    return start if all(result is start for result in results) else not start


def unmerged(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """No rule is known to fit."""
    raise NoFit


_MOST_NEW = 1000  # items that are looked for at the end of a deque that has let go of others
_RULES: list[Rule] = [
    same,
    summed,
    added,
    joined,
    one_by_one,
    averaged_one_by_one,
    merged,  # takes a list of as many items as there are samples for one of samples
    averaged,
    largest,
    smallest,
    first,
    flipped,
    *(rule for blocks in (InBlocks(2), InBlocks(3), InBlocks(4)) for rule in (blocks, blocks.of_items)),
]


def rule_for(start: Any, trials: Sequence[Trial], merge: Merge, *, anew: bool = False) -> Rule | None:
    """The rule that makes of two micro-batches' results that of both as one batch, in every trial.

    Args:
        start: What stood there before.
        trials: What was left each time.
        merge: Merges one value per micro-batch.
        anew: Whether another object stands there afterwards, or a container with others in it.

    Returns:
        None where none fits.
    """
    is_added_to = all(_tensors(trial.after) > _tensors(trial.other) for trial in trials)
    rows = rows_in(*trials[0][:2], trials[0].whole) if anew and not is_added_to else None
    if rows is not None and all(_fits(rows, start, trial, merge) for trial in trials):
        return rows
    if all(isinstance(value, dict) for trial in trials for value in trial[:4]):
        return _rule_by_key(start if isinstance(start, dict) else {}, trials, merge)
    for rule in _RULES:
        if all(_fits(rule, start, trial, merge) for trial in trials):
            return _of_items(rule, start, trials) if isinstance(start, list | deque) else rule
    return None


def _of_items(rule: Rule, start: Any, trials: Sequence[Trial]) -> Rule:
    """A rule for what is added to a container, with how much that is where it may be full later."""
    try:
        added = [[len(new) for new in _new_items(start, list(trial[:2]))] for trial in trials]
    except NoFit:
        return rule
    new = [item for trial in trials for result in trial[:2] for item in _new_items(start, [result])[0]]
    if rule is same and new and all(map(_is_float, new)):
        rule = alike_one_by_one  # of whole numbers nobody knows whether they are counts
    is_full = isinstance(start, deque) and start.maxlen == len(start)  # and does not tell
    if not isinstance(start, deque) or start.maxlen is None or is_full or not added[0][0] or rule is same:
        return rule
    sizes = [list(trial.sizes) for trial in trials]
    each = added[0][0] // sizes[0][0]
    by_samples = rule is joined and added == [[each * size for size in own] for own in sizes]
    return OfWindow(rule, each if by_samples else added[0][0], by_samples=by_samples)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _tensors(value: Any) -> int:
    return len(list(tensors_in(value)))


def fits_by_place(start: Any, trials: Sequence[Trial], merge: Merge) -> bool:
    """Whether entries are written, which may have fitted a sum while no two micro-batches wrote the same."""
    return all(_fits(by_place, start, trial, merge) for trial in trials)


def goes_on(rule: Rule, start: Any, trial: Trial, merge: Merge) -> bool:
    """Whether a rule fits what two micro-batches leave where a batch has been before them.

    Args:
        rule: That fits where none has been.
        start: What the batch before has left.
        trial: What was left then; `after` is not looked at.
        merge: Merges one value per micro-batch.
    """
    if equal(trial.one, start) and equal(trial.other, start):
        return equal(trial.whole, start)
    try:
        if isinstance(start, list | deque):  # items that are added are put together by themselves
            new = _new_items(start, [trial.one, trial.other, trial.whole])
            return equal(list(rule([], new[:2], list(trial.sizes), merge)), new[2])
    except NoFit:
        pass
    try:
        return equal(rule(start, [trial.one, trial.other], list(trial.sizes), merge), trial.whole)
    except NoFit:
        return False


def _fits(rule: Rule, start: Any, trial: Trial, merge: Merge) -> bool:
    if rule is same and not equal(trial.one, trial.other):
        return False
    if rule in (joined, one_by_one, averaged_one_by_one) and _begins_anew(start, trial):
        return False
    # A largest value goes on or begins anew. A sum that decays does neither, and fits where few rows add.
    apart = not equal(trial.after, trial.whole) and not equal(trial.after, trial.other)
    if rule in (largest, smallest) and apart:
        return False
    # What is added up goes on from what was there; what begins anew does not.
    if rule in (summed, added) and (rule is summed) is not equal(trial.after, trial.whole):
        return False
    try:
        return equal(rule(start, [trial.one, trial.other], list(trial.sizes), merge), trial.whole)
    except NoFit:
        return False


def _begins_anew(start: Any, trial: Trial) -> bool:
    """Whether a list is emptied first, so that nothing is added to what a batch before has left."""
    if not isinstance(start, list) or not all(isinstance(left, list) for left in (trial.other, trial.after)):
        return False
    return len(trial.after) == len(trial.other) > len(start)


def _rule_by_key(start: Any, trials: Sequence[Trial], merge: Merge) -> Rule | None:
    if all(callable(value) for trial in trials for result in trial[:4] for value in result.values()):
        return same if len(trials[0].one) == len(trials[0].whole) else None  # hooks
    rules: dict[Any, Rule] = {}
    for key in dict.fromkeys(key for trial in trials for result in trial[:4] for key in result):
        inner = [trial.entry(key) for trial in trials]
        held = start.get(key)
        if isinstance(held, list | deque | set) and all(equal(r, held) for t in inner for r in t[:4]):
            continue  # nothing is known of it, such as of the list of another loader
        missing = any(value is MISSING for trial in inner for value in trial[:4])
        held = _begun(start.get(key, MISSING), [value for trial in inner for value in trial[:4]])
        rule = None if missing else rule_for(held, inner, merge)
        if rule is None:
            return None
        rules[key] = rule
    return ByKey(rules)


def _begun(start: Any, results: Sequence[Any]) -> Any:
    """What a list, deque or set was before anything was added to it, where there was none: `setdefault`."""
    kinds = {type(result) for result in results}
    if start is not MISSING or len(kinds) != 1 or not kinds <= {list, deque, set}:
        return start
    return _emptied(results[0])


def _with_none_added(values: list[Any]) -> list[Any]:
    """The same with empty lists or sets where a micro-batch had nothing to add under a key."""
    there = [value for value in values if value is not MISSING]
    empty = _begun(MISSING, there) if there else MISSING
    return [empty if value is MISSING else value for value in values]


def _emptied(container: Any) -> Any:
    empty = container.copy()
    empty.clear()
    return empty


def _are_tensors(start: Any, results: list[Any]) -> bool:
    values = [start, *results]
    return all(isinstance(value, Tensor) and value.dtype is not torch.bool for value in values) and all(
        result.shape == start.shape for result in results
    )


def _extreme(results: list[Any], of_tensors: Any, of_numbers: Any) -> Any:
    if _are_tensors(results[0], results):
        found = results[0]
        for result in results[1:]:
            found = of_tensors(found, result)
        return found
    if not all(map(is_number, results)):
        raise NoFit
    return of_numbers(results)


def _of_type(results: list[Any], kind: type) -> list[Any]:
    if not all(isinstance(result, kind) for result in results):
        raise NoFit
    return results


def _new_items(start: Any, results: list[Any], counts: Sequence[int] = ()) -> list[list[Any]]:
    """What each result has beyond the items of `start`; a deque may have lost some of these.

    A full one does not tell how many are new where they are the same objects, as small numbers are: then
    these are as many as `counts` says, or as few as others may have.
    """
    _of_type([start], list | deque)  # type: ignore[arg-type]
    _of_type(results, list | deque)  # type: ignore[arg-type]
    before, maxlen = list(start), getattr(start, "maxlen", None)
    lists = list(map(list, results))
    known = [min(count, len(result)) for count, result in zip(counts, lists, strict=False)]
    if known and all(_adds(before, *pair) for pair in zip(lists, known, strict=True)):
        return [result[len(result) - count :] for result, count in zip(lists, known, strict=True)]
    found = [_numbers_added(before, result, maxlen) for result in lists]
    if not any(own[0] for own in found):
        return [[] for _ in lists]
    shared = sorted(set.intersection(*map(set, found)) - {0})
    numbers = [shared[0] if shared and len(own) > 1 else own[0] for own in found]
    return [result[len(result) - number :] for result, number in zip(lists, numbers, strict=True)]


def _numbers_added(before: list[Any], result: list[Any], maxlen: int | None) -> list[int]:
    """How many items may be new, the fewest first; of a full deque, whose items may be alike, few numbers."""
    fewest = max(len(result) - len(before), 0)
    most = min(fewest + _MOST_NEW, len(result)) if len(result) == maxlen else fewest
    found = [number for number in range(fewest, most + 1) if _adds(before, result, number)]
    if not found and len(result) == maxlen:
        return [len(result)]  # nothing of what was there is left
    if not found or (len(result) < len(before) and len(result) != maxlen):
        raise NoFit
    return found


def _adds(before: list[Any], result: list[Any], number: int) -> bool:
    """Whether so many items at the end may be new, after the last ones that were there."""
    kept = len(result) - number
    return kept <= len(before) and all(map(is_, before[len(before) - kept :], result[:kept]))


def _with(start: Any, items: list[Any]) -> Any:
    return deque([*start, *items], start.maxlen) if isinstance(start, deque) else [*start, *items]
