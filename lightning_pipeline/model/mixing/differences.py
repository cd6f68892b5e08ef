"""What differs between runs of a step without units: with another sample in one's place, or in a micro-batch.

A sample that a unit is given then differs from the first run's only where it is the one that was exchanged.
Anything else that differs was made of several samples, whatever functions and numbers of Python made it. The
same holds for what meets values of units.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.mixing.calls import Functions, Seen, decided_between
from lightning_pipeline.model.mixing.looks import AsGiven, Reached
from lightning_pipeline.model.mixing.meetings import Meetings, Met, name_of
from lightning_pipeline.model.mixing.rows import Rows
from lightning_pipeline.model.mixing.sums import goes_by_sizes
from lightning_pipeline.model.tensors import is_placeholder, map_tensors


class Comparison:
    """Runs of a step without units, compared.

    Args:
        run: Runs it for a micro-batch, or None for the batch, before somebody's eyes, on changed arguments.
        root: The LightningModule.
        elsewhere: Parameters and buffers that some ranks do not have.
        sizes: Samples of each micro-batch.

    Attributes:
        by_sizes: Whether it is found to read whole numbers of the batch, such as its greatest length.
        left_at: The last line of a step that freezes other parameters for a micro-batch than for the batch.
    """

    def __init__(
        self, run: Callable[[int | None, Functions, Callable[[Any], Any]], None], root: nn.Module,
        elsewhere: Sequence[Tensor], sizes: Sequence[int],
    ) -> None:  # fmt: skip
        self._run, self._root, self._elsewhere, self._sizes = run, root, elsewhere, sizes
        self.by_sizes, self.left_at = False, ""

    def is_as_given(self, part: int, batch: Any, elsewhere: Sequence[Tensor]) -> bool:
        """Whether the step takes a micro-batch as it stands, so that there is nothing to compare.

        Args:
            part: Its number.
            batch: Its arguments.
            elsewhere: Parameters and buffers that some ranks do not have.
        """
        seen = AsGiven(self._root, elsewhere, batch)
        self._run(part, seen, lambda given: given)
        return seen.is_so

    def lines(self, number: int, *, decides: bool) -> dict[str, tuple[str, int]]:
        """Lines at which it mixes samples, by which function, and how many calls of units there had been.

        Args:
            number: Of the micro-batch because of which it is looked at.
            decides: Whether it may be decided by the batch what it does.
        """
        found = self._decided() if decides else {}
        if found:
            return found
        whole = self._reached(None)
        own = number if number and self._sizes[number] > 1 else None
        return self._placed(whole) or self.lines_of(own, whole if own is None else None)

    def _decided(self) -> dict[str, tuple[str, int]]:
        whole, parts = self._seen(None, Seen(self._elsewhere)), []
        for number in range(len(self._sizes)):
            own = self._seen(number, Seen(self._elsewhere, root=self._root))
            parts.append(own)
            if own.left and whole.left and own.left != whole.left and own.lines:
                self.left_at = own.lines[-1]
            if own.keys != whole.keys:
                for also in whole.asks():
                    given = self._seen(number, Seen(self._elsewhere, whole, also=also))
                    if found := decided_between(whole, own, given):
                        return found
        if all(own.keys == whole.keys for own in parts):
            self.by_sizes = goes_by_sizes(whole, parts)
        return {}

    def _seen(self, part: int | None, seen: Seen) -> Seen:
        self._run(part, seen, lambda batch: batch)
        return seen

    def _placed(self, whole: Reached) -> dict[str, tuple[str, int]]:
        """By the last micro-batch, and by the first: the last rows of a memory are the last one's own."""
        for number in (len(self._sizes) - 1, 0):
            rows = Rows(sum(self._sizes[:number]), self._sizes[number], sum(self._sizes))
            if found := placed_between(whole, self._reached(number), rows):
                return found
        return {}

    def lines_of(self, part: int | None, first: Reached | None = None) -> dict[str, tuple[str, int]]:
        """Those which a micro-batch alone, or the batch, shows.

        Args:
            part: Its number; None for the batch.
            first: A run for it, where there was one.
        """
        samples = sum(self._sizes) if part is None else self._sizes[part]
        if samples < 2:
            return {}
        others = [(row, self._reached(part, made)) for row, made in exchanges(samples)]
        first, alike = first or self._reached(part), self._reached(part, _all_alike)
        if not _mixed_between(first, first, others, alike, samples):
            return {}
        return _mixed_between(first, self._reached(part), others, alike, samples)

    def _reached(self, part: int | None, made: Callable[[Tensor], Tensor] | None = None) -> Reached:
        reached = Reached(self._root, self._elsewhere)
        samples = sum(self._sizes) if part is None else self._sizes[part]
        changed = (
            (lambda batch: batch) if made is None else (lambda batch: with_another(batch, samples, made))
        )
        self._run(part, reached, changed)
        return reached


def exchanges(samples: int) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
    """Which sample is exchanged in each run, and what its row is made of.

    Args:
        samples: How many there are.
    """
    last = samples - 1

    def like(row: int, other: int) -> Callable[[Tensor], Tensor]:
        def exchanged(tensor: Tensor) -> Tensor:
            found = tensor.clone()
            found[row] = tensor[other]
            return found

        return exchanged

    def farther(tensor: Tensor) -> Tensor:
        found = tensor.clone()
        if not tensor.numel():
            return found
        if tensor.dtype is torch.bool:
            found[0] = ~tensor[0]
        elif tensor.is_floating_point() and tensor.element_size() > 1:  # numbers of one byte have no largest
            found[0] = tensor[0] * 1.5 + tensor.abs().max()
        elif not tensor.is_floating_point() and not tensor.is_complex():
            least, most = tensor.min(), tensor.max()
            found[0] = torch.where(tensor[0] == most, least, most)
        return found

    return [(0, like(0, last)), (last, like(last, 0)), (0, farther)]


def _all_alike(tensor: Tensor) -> Tensor:
    """Each sample is the first one."""
    return tensor[:1].expand_as(tensor).clone()


def with_another(batch: Any, samples: int, made: Callable[[Tensor], Tensor]) -> Any:
    """A batch in which one sample is another.

    Args:
        batch: Its arguments.
        samples: How many it has.
        made: Makes a tensor with that sample exchanged.
    """

    def exchanged(tensor: Tensor) -> Tensor:
        plain = tensor.layout is torch.strided and tensor.dim() > 0
        return made(tensor) if plain and tensor.shape[0] == samples else tensor

    return map_tensors(exchanged, batch)


def _mixed_between(
    first: Reached, again: Reached, others: Sequence[tuple[int, Reached]], alike: Reached, samples: int
) -> dict[str, Any]:
    """Lines at which samples were mixed. What differs in `again`, the same once more, says nothing."""
    if not _is_same(first, again):
        return {}
    runs = [(row, one.meetings) for row, one in others]
    if met := _met_between(first.meetings, again.meetings, runs, alike.meetings, samples):
        return {met.line: (name_of(met.func), met.position)}
    touched: dict[int, set[int]] = {0: set(), samples - 1: set()}
    for row, other in others:
        if [one.unit for one in first.units] != [one.unit for one in other.units]:
            continue  # it went elsewhere, which says nothing
        for place, (before, after) in enumerate(zip(first.units, other.units, strict=True)):
            for pair in zip(before.values, after.values, strict=False):
                kind = _changed(*pair, row, samples)
                if kind == "others":
                    return _line(first, other, row, samples, place)
                if kind == "all":
                    touched[row].add(place)
    start, end = touched.values()
    shared = _shared(start, end, len(first.units), samples)
    return {} if shared is None else {first.units[shared].line: ("one for all samples", shared)}


def _shared(start: set[int], end: set[int], count: int, samples: int) -> int | None:
    """The first place that goes by the first or by the last sample, unless there is one for each of them."""
    one_by_one = start and end and not start & end and count >= samples
    return min(start | end) if (start or end) and not one_by_one else None


def _met_between(
    first: Meetings, again: Meetings, others: Sequence[tuple[int, Meetings]], alike: Meetings, samples: int
) -> Met | None:
    """Where values of units meet what follows from other samples."""
    chance = {place for place, *met in _pairs(first, again) if any(_differs(*both) for both in _values(*met))}
    decides = first.decides | {place for place in first.moved if _may_have(first.met[place], samples)}

    def touched(row: int, other: Meetings, changed: Callable[[Any, Any, int, int], Any]) -> set[int]:
        return {
            place
            for place, one, same in _pairs(first, other)
            if place in decides - chance
            for both in _values(one, same)
            if changed(*both, row, samples) or _is_another(*both, one, same)
        }

    start = {place for row, other in others if not row for place in touched(row, other, _changed)}
    end = {place for row, other in others if row for place in touched(row, other, _changed)}
    if not start and not end:  # a number that one sample does not change, as that of classes
        start = end = touched(0, alike, _changed_for_one)
    place = _shared(start, end, len(first.met), samples)
    return None if place is None else first.met[place]


def _may_have(met: Met, samples: int) -> bool:
    """Whether what came out may have something for each sample."""
    return any(size and size % samples == 0 for size in met.result or ())


def _changed_for_one(before: Any, after: Any, row: int, samples: int) -> bool:
    """What differs for a sample where the others are exchanged."""
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return _is_another_float(before, after)
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    rows = list(zip(_rows(before, row, samples), _rows(after, row, samples), strict=True))
    return all(_differs(*pair) for pair in rows or [(before, after)])


def _rows(tensor: Tensor, row: int, samples: int) -> Iterator[Tensor]:
    """What may be one sample's of a tensor, by each way in which a dimension may have all of them."""
    for dim, size in enumerate(tensor.shape):
        if size and size % samples == 0:
            for cut in _cuts(tensor.movedim(dim, 0), samples):
                yield cut[:, row]


def _cuts(tensor: Tensor, samples: int) -> Iterator[Tensor]:
    """A first dimension that has samples once or more often, as (before, samples, after, ...)."""
    times = len(tensor) // samples
    for before in (one for one in range(1, times + 1) if times % one == 0):
        yield tensor.reshape(before, samples, times // before, *tensor.shape[1:])


def _pairs(first: Meetings, other: Meetings) -> Iterator[tuple[int, Met, Met]]:
    """Places with the meetings of two runs, as long as these call the same functions and units."""
    both = zip(first.called, other.called, strict=False)
    alike = next((n for n, (one, same) in enumerate(both) if one != same), len(first.called))
    for place, (one, same) in enumerate(zip(first.met, other.met, strict=False)):
        if one.nth > alike or one.func != same.func:
            return
        yield place, one, same


def _values(one: Met, other: Met) -> Iterator[tuple[Any, Any]]:
    return zip(one.values, other.values, strict=False)


def _is_another(before: Any, after: Any, one: Met, other: Met) -> bool:
    """Whether a whole number that is no size differs."""
    whole = type(before) is int and type(after) is int and one.result == other.result
    return whole and before != after


def placed_between(whole: Reached, own: Reached, rows: Rows) -> dict[str, Any]:
    """Lines at which what units are given, or meet, goes by the place of a sample, or by other samples.

    Args:
        whole: A run for the batch.
        own: One for a micro-batch.
        rows: Of the micro-batch.
    """
    if [one.unit for one in whole.units] == [one.unit for one in own.units]:
        for place, (given, mine) in enumerate(zip(whole.units, own.units, strict=True)):
            pairs = enumerate(zip(given.values, mine.values, strict=False))
            if any(_is_out_of_place(*pair, rows) for n, pair in pairs if n not in given.drawn | mine.drawn):
                return {given.line: ("what a unit is given", place)}
    return _met_out_of_place(whole.meetings, own.meetings, rows)


def _met_out_of_place(whole: Meetings, own: Meetings, rows: Rows) -> dict[str, Any]:
    if [one.func for one in whole.met] != [one.func for one in own.met]:
        return {}
    grown = {place for place in whole.moved if whole.met[place].result != own.met[place].result}
    for place in sorted((whole.decides & own.decides | grown & own.moved) - whole.drawn):
        met = whole.met[place]
        for theirs, mine in _values(met, own.met[place]):
            if _is_out_of_place(theirs, mine, rows):
                return {met.line: (name_of(met.func), met.position)}
    return {}


def _is_out_of_place(theirs: Any, mine: Any, rows: Rows) -> bool:
    if not isinstance(theirs, Tensor) or not isinstance(mine, Tensor):
        several = type(theirs) is float and type(mine) is float and _is_another_float(theirs, mine)
        return several and not math.isclose(theirs, mine, rel_tol=1e-9)
    part = rows.of(theirs, mine)
    if part is None or part.is_complex() or is_placeholder(part) or is_placeholder(mine):
        return False
    sizes = part[part.isfinite()].abs() if part.is_floating_point() else part.new_zeros(0)
    scale = 1e-9 * float(sizes.max()) if sizes.numel() else 0.0
    return not torch.allclose(part.double(), mine.double(), rtol=1e-6, atol=scale, equal_nan=True)


def _is_same(first: Reached, again: Reached) -> bool:
    pairs = zip(first.units, again.units, strict=False)
    return len(first.units) == len(again.units) and all(
        one.unit == other.unit
        and all(not _differs(*both) for both in zip(one.values, other.values, strict=False))
        for one, other in pairs
    )


def _differs(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return _is_another_float(one, other)
    return one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num())


def _is_another_float(one: Any, other: Any) -> bool:
    if type(one) is not float:  # a tensor beside a number is compared by its values
        return False
    return type(other) is not float or not (one == other or (math.isnan(one) and math.isnan(other)))


def _line(first: Reached, other: Reached, row: int, samples: int, place: int) -> dict[str, tuple[str, int]]:
    """Where a sample first followed from another one before a call of a unit."""
    for (func, before, line, position), (same, after, *_) in zip(first.results, other.results, strict=False):
        if func is not same or position > place:
            break
        if _changed(before, after, row, samples) == "others":
            return {line: (getattr(func, "__name__", "a function").strip("_"), position)}
    return {first.units[place].line: ("what a unit is given", place)}


def _changed(before: Any, after: Any, row: int, samples: int) -> str:
    """What differs where a sample was exchanged: "" for nothing or it alone, "others", "all" without rows."""
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return "all" if _is_another_float(before, after) else ""
    if before.shape != after.shape or before.dtype != after.dtype:
        return ""
    if before.is_floating_point():
        before, after = before.double(), after.double()
    differs = ~torch.isclose(before, after, rtol=1e-6, atol=0.0, equal_nan=True)
    if not bool(differs.any()):
        return ""
    many = [dim for dim, size in enumerate(differs.shape) if size % samples == 0]
    if not many:
        return "all"
    return "" if any(_is_of_one(differs, dim, row, samples) for dim in many) else "others"


def _is_of_one(differs: Tensor, dim: int, row: int, samples: int) -> bool:
    """Whether nothing but one sample differs along a dimension that has each of them once or more often."""
    flat = differs.movedim(dim, 0).flatten(1).any(1) if differs.dim() > 1 else differs
    for cut in _cuts(flat, samples):
        others = cut.any(2).any(0)[torch.arange(samples, device=cut.device) != row]
        if not bool(others.any()):
            return True
    return False
