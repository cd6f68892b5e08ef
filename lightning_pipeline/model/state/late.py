"""Buffers and plain tensors that the end of a step writes: the last stage has them, every rank reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def late_values(root: nn.Module, names: Sequence[str]) -> list[Tensor]:
    """What this rank has in them, on CPU.

    Args:
        root: The LightningModule.
        names: In it, such as `matrix` or `head.average`.
    """
    return [_get(*_place(root, name)).detach().cpu() for name in names]


def put_late_values(root: nn.Module, names: Sequence[str], values: Sequence[Tensor]) -> None:
    """Let this rank have the same in them as the last stage.

    Args:
        root: The LightningModule.
        names: In it.
        values: One for each.
    """
    for name, value in zip(names, values, strict=True):
        holder, own = _place(root, name)
        mine = _get(holder, own)
        if mine.shape == value.shape and mine.dtype == value.dtype:
            with torch.no_grad():
                mine.copy_(value)
        else:
            (holder._buffers if own in holder._buffers else vars(holder))[own] = value.to(mine.device)


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return root.get_submodule(path), own


def _get(holder: nn.Module, name: str) -> Tensor:
    value = holder._buffers.get(name)
    found: Tensor = vars(holder)[name] if value is None else value
    return found
