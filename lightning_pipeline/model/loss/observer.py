"""What the whole batch's step does between units, seen once for all of its micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.loss.calls import Call
from lightning_pipeline.model.loss.events import Event, Whole
from lightning_pipeline.model.loss.functions import (
    BY_VALUES,
    READING,
    REPEATING,
    SELECTING,
    TAKING,
    written_by,
)
from lightning_pipeline.model.loss.masks import as_indices, has_mask
from lightning_pipeline.model.loss.reductions import LOSSES, reduction_of, valid_targets
from lightning_pipeline.model.loss.shares import RULED, operand_of, shape_of
from lightning_pipeline.model.tensors import is_placeholder, storage_key


class Observer:
    """Sees the functions of one run of a step over the whole batch.

    Args:
        batch: Its tensors.
    """

    def __init__(self, batch: Sequence[Tensor]) -> None:
        self.whole = Whole()
        self._batch = {storage_key(tensor): position for position, tensor in enumerate(batch)}
        self._copies: list[Tensor] = []  # held, so that no memory is used twice
        self._after: Call = None

    def unit(self, number: int, nth: int) -> None:
        """A unit was called."""
        self._after = (number, nth)

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Run a function and note what it was given."""
        return self.whole.calls.run(
            self._after, func, args, kwargs, lambda: self._observed(func, args, kwargs, run)
        )

    def _observed(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        for written in written_by(func, args, kwargs):
            self._batch.pop(storage_key(written), None)
        if func is Tensor.__getitem__ and has_mask(args[1]):
            self.whole.ragged = True
            args = (args[0], as_indices(args[1])) if is_placeholder(args[0]) else args
        elif func in SELECTING and is_placeholder(args[0]) and not is_placeholder(args[1]):
            self.whole.ragged = True
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            func, args = Tensor.__getitem__, (args[0].expand(shape), as_indices(args[1].expand(shape)))
        elif func in BY_VALUES or (
            func in REPEATING and any(map(is_placeholder, (*args[1:], *kwargs.values())))
        ):
            self.whole.ragged = True
        elif func in READING and not is_placeholder(args[0]):
            self.whole.reads = True
        if func not in RULED:
            return self._copied(func, args, kwargs, run(func, args, kwargs))
        operands = tuple(operand_of(arg, copied=True) for arg in args[:2])
        count = valid_targets(func, args, kwargs) if func in LOSSES else None
        if count is not None:
            self.whole.targets.append(self._place(func, args, kwargs))
        result = run(func, args, kwargs)
        event = Event(func, operands, shape_of(result), count)
        self.whole.events.setdefault(self._after, []).append(event)
        return result

    def _copied(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Note which tensor of the batch a copy's values are of, as `labels[:, 1:].flatten()` makes one."""
        if func in TAKING and isinstance(result, Tensor) and not is_placeholder(result):
            position = self._batch.get(storage_key(args[0])) if isinstance(args[0], Tensor) else None
            if position is not None and result.dtype == args[0].dtype:
                self._batch[storage_key(result)] = position
                self._copies.append(result)
        return result

    def _place(self, func: Any, args: Any, kwargs: Any) -> tuple[int, int] | None:
        call = reduction_of(func, args, kwargs)
        position = self._batch.get(storage_key(call.target))
        return None if position is None or call.weight is not None else (position, call.ignore_index)
