"""What numbers that a step leaves behind in micro-batches are of the batch's, where that is followed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.data import rebuilt
from lightning_pipeline.model.rules import Merge
from lightning_pipeline.model.tensors import is_placeholder, items_of

_NESTED = (list, tuple, dict)


class NumberParts:
    """Puts numbers together as those that a step logs: sums, and means over what counts.

    Args:
        part_of: What a number of the micro-batch that runs is of the batch's.

    Attributes:
        has_unknown: Whether there are numbers of which that is not found out.
    """

    def __init__(self, part_of: Callable[[Any], Any]) -> None:
        self._part_of = part_of
        self._known: dict[int, tuple[Any, Any]] = {}  # with what it is of, so that no identity comes twice
        self.has_unknown = False

    def note(self, values: Iterable[Any]) -> None:
        """A micro-batch has left these values, with numbers in them."""
        for number in (one for value in values for one in _numbers_in(value)):
            part = self._part_of(number)
            self.has_unknown |= part.value is not None and not part.is_known
            if part.is_known:
                self._known[id(number)] = number, part

    def merging(self, merge: Merge) -> Merge:
        """The same way to merge, but for numbers of which the part is known."""

        def merged(values: list[Any], sizes: list[int]) -> Any:
            return self._into(merge(values, sizes), values)

        return merged if any(part.differs for _, part in self._known.values()) else merge

    def _into(self, whole: Any, values: Sequence[Any]) -> Any:
        """What micro-batches' values were merged to, with what is known of the numbers in it."""
        parts = [self._known[id(value)][1] for value in values if id(value) in self._known]
        if len(parts) == len(values) and any(part.differs for part in parts):
            each = [torch.as_tensor(part.value).detach().double().reshape(()) for part in parts]
            total = torch.stack(each).sum()
            return float(total) if isinstance(values[0], float) else total.to(values[0])
        if not isinstance(whole, _NESTED) or any(_form(value) != _form(whole) for value in values):
            return whole
        return rebuilt(whole, lambda item, key: self._into(item, [value[key] for value in values]))


def _numbers_in(value: Any) -> Iterator[Any]:
    """Floating numbers in lists, tuples and dictionaries."""
    if type(value) is float or (isinstance(value, Tensor) and not value.dim() and not is_placeholder(value)):
        yield value
    elif isinstance(value, _NESTED):
        for _, item in items_of(value):
            yield from _numbers_in(item)


def _form(value: Any) -> Any:
    return type(value), [key for key, _ in items_of(value)] if isinstance(value, _NESTED) else None
