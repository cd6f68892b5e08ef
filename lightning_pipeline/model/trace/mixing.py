"""Operations between units that mix the samples of the batch: one device mixes those of the whole batch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.tensors import Tag, TagStore, is_placeholder, operands_of, tensors_in, user_line
from lightning_pipeline.model.trace.record import Observation

_MAY_MIX = frozenset(
    f"aten::{name}"
    for name in (
        "index", "index_select", "gather", "take_along_dim", "flip", "roll", "sort", "argsort", "cumsum",
        "cumprod", "rot90",
    )
)  # fmt: skip
_TRIED = 4  # samples that are changed to see what depends on them
_DERIVED = frozenset({Tag("batch")})


class MixingSeen:
    """Tries out, for operations on what comes from the batch alone, whether samples stay apart.

    Args:
        observed: The step, whose trace is told.
    """

    def __init__(self, observed: Observation) -> None:
        self._observed = observed
        self._derived, self._drawn = TagStore(), TagStore()
        self._samples = 0

    def begin(self, batch: Any) -> None:
        """The step begins, with these arguments."""
        held = [tensor for tensor in tensors_in(batch) if tensor.dim() and not is_placeholder(tensor)]
        self._samples = held[0].shape[0] if held else 0
        for tensor in held:
            self._derived.add(tensor, _DERIVED)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run.

        Args:
            func: It.
            args: Its arguments.
            kwargs: Likewise.
            result: What it gave.
        """
        operands, results = list(operands_of(args, kwargs)), list(operands_of((result,)))
        if self._samples < 2 or any(map(is_placeholder, (*operands, *results))):
            return
        if torch.Tag.nondeterministic_seeded in func.tags or any(map(self._drawn.of, operands)):
            for tensor in results:
                self._drawn.add(tensor, _DERIVED)
        if not any(map(self._derived.of, operands)):
            return
        if func._schema.name in _MAY_MIX and self._mixes(func, args, kwargs, results):
            found = func._schema.name.removeprefix("aten::"), len(self._observed.trace.calls)
            self._observed.trace.mixed.setdefault(user_line(self._observed.root), found)
        for tensor in results:
            self._derived.add(tensor, _DERIVED)

    def _mixes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> bool:
        """Whether a sample of a result changes where another one of the first operand does."""
        data = args[0]
        if not self._has_rows([data, *results]) or not self._derived.of(data):
            return False
        rows: Any = args[1] if len(args) > 1 else None
        if func._schema.name == "aten::index" and rows[0] is not None and self._drawn.of(rows[0]):
            return True  # which may be the order that stands there, by chance
        for row in range(min(_TRIED, self._samples)):
            other = data.clone()
            other[row] = ~data[row] if data.dtype is torch.bool else data[row] + 1
            found = operands_of((func(other, *args[1:], **kwargs),))
            for before, after in zip(results, found, strict=True):
                differs = (before != after).reshape(self._samples, -1).any(1)
                differs[row] = False
                if bool(differs.any()):
                    return True
        return False

    def _has_rows(self, tensors: Iterable[Tensor]) -> bool:
        return all(tensor.dim() and tensor.shape[0] == self._samples for tensor in tensors)
