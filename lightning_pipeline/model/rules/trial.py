"""What a rule is, and what rules are tried on."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_pipeline.model.places import MISSING

Merge = Callable[[list[Any], list[int]], Any]
"""Merges one value per micro-batch, with the samples of each."""
Rule = Callable[[Any, list[Any], list[int], Merge], Any]
"""Makes of what stood somewhere, and of what each micro-batch left, what the batch leaves."""
CHAINED = None
"""Instead of a rule: micro-batches follow each other, as in gradient accumulation."""


class NoFit(Exception):
    """A rule does not apply to such values."""


class Trial(NamedTuple):
    """What two micro-batches leave.

    Attributes:
        one: The first.
        other: The second, beginning with what was there as well.
        after: The second, beginning with what the first left.
        whole: Both as one batch.
        sizes: Samples of the two.
    """

    one: Any
    other: Any
    after: Any
    whole: Any
    sizes: tuple[int, int]

    def entry(self, key: Any) -> "Trial":
        """The same of one entry of dictionaries."""
        one, other, after, whole = (left.get(key, MISSING) for left in self[:4])
        return Trial(one, other, after, whole, self.sizes)
