"""Tensors that the end of a step writes: the last stage has their values, other ranks have them too."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_pipeline.model.tensors import is_placeholder


def late_values(root: nn.Module, names: Sequence[str]) -> list[Tensor | None]:
    """What this rank has in them, on CPU; None for what only stands for a value of another stage.

    Args:
        root: The LightningModule.
        names: In it, such as `matrix` or `head.average`.
    """
    values = [_get(*_place(root, name)) for name in names]
    return [None if is_placeholder(value) else value.detach().cpu() for value in values]


def put_late_values(root: nn.Module, names: Sequence[str], values: Sequence[Tensor | None]) -> None:
    """Let this rank have the same in them as the last stage.

    Args:
        root: The LightningModule.
        names: In it.
        values: One for each.
    """
    for name, value in zip(names, values, strict=True):
        holder, own = _place(root, name)
        mine = _get(holder, own)
        if value is None or is_placeholder(mine):
            continue
        if mine.shape == value.shape and mine.dtype == value.dtype:
            with torch.no_grad():
                mine.copy_(value)
        else:
            (holder._buffers if own in holder._buffers else vars(holder))[own] = value.to(mine.device)


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return root.get_submodule(path), own


def _get(holder: nn.Module, name: str) -> Tensor:
    for registry in (holder._buffers, holder._parameters):
        value = registry.get(name)
        if value is not None:
            return value
    found: Tensor = vars(holder)[name]
    return found
