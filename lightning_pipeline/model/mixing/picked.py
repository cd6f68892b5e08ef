"""Tensors of as many samples as a mask picks, or as values say: their size is a number of the batch."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipeline.model.mixing.meetings import is_set, name_of, picks
from lightning_pipeline.model.tensors import is_placeholder, operands_of, tensors_in

COUNTS: frozenset[Any] = frozenset({
    Tensor.__len__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel, cast(Any, Tensor).shape.__get__,
})  # fmt: skip
"""Functions that tell how many samples a tensor has."""


class Picked:
    """Those of one run of a step.

    Args:
        sets: Whether different values and counts of each, as `torch.unique` gives, are among them.
    """

    def __init__(self, *, sets: bool = False) -> None:
        self._sets = sets
        self._known: Any = WeakIdKeyDictionary()
        """For each, whether values of the batch have picked it."""

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
        """A function has run: whether it gave one, or several.

        Args:
            func: It.
            args: Its arguments.
            kwargs: Likewise.
            result: What it gave.
        """
        picked = picks(func, args) or _repeats(func, args, kwargs) or (self._sets and is_set(func))
        if not (picked or self._known):
            return False
        made = list(tensors_in(result))
        if picked:
            index = args[1:] if len(args) > 1 else args
            by_batch = not any(map(is_placeholder, tensors_in((index, kwargs))))
            self._known.update((one, by_batch) for one in made)
            return bool(made)
        known = [one for one in operands_of(args, kwargs) if one in self._known]
        rows = {one.shape[0]: self._known[one] for one in known if one.dim()}
        found = [one for one in made if one.dim() and one.shape[0] in rows]
        self._known.update((one, rows[one.shape[0]]) for one in found)
        return bool(found)

    def counts(self, func: Any, args: Any) -> bool:
        """Whether a call tells Python how many samples values of the batch have picked.

        Args:
            func: It.
            args: Its arguments.
        """
        return func in COUNTS and bool(self._known) and bool(self._known.get(args[0], False))


def _repeats(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function gives each sample as often as values say."""
    times = (*args[1:], *kwargs.values())
    return name_of(func) == "repeat_interleave" and any(isinstance(one, Tensor) for one in times)
