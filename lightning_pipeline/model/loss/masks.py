"""Masks that pick samples."""

from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.tensors import is_placeholder


def has_mask(index: Any) -> bool:
    """Whether an index picks by a mask."""
    return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in indices(index))


def indices(index: Any) -> tuple[Any, ...]:
    """What an index is made of."""
    return index if isinstance(index, tuple) else (index,)


def as_indices(index: Any) -> tuple[Any, ...]:
    """Real masks as the numbers of what they pick, from what has a shape and no content."""
    picked: list[Any] = []
    for part in indices(index):
        is_mask = isinstance(part, Tensor) and part.dtype is torch.bool and not is_placeholder(part)
        picked.extend(part.nonzero(as_tuple=True) if is_mask else (part,))
    return tuple(picked)
