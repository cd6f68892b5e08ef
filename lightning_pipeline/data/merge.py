"""What the micro-batches of a batch returned becomes what one device would have returned."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.data.microbatch import rebuilt
from lightning_pipeline.data.samples import (
    are_alike,
    are_objects,
    are_texts,
    arrays_in,
    is_batched,
    is_list,
    items_of,
)
from lightning_pipeline.errors import ConfigurationError


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Merge what a step returned for each micro-batch.

    * Tensors whose first dimension is the micro-batch's size, and lists of that length: concatenated. Tuples
      of texts of that length too, unless they are equal everywhere.
    * 0-dim floating tensors and floats: mean, weighted by the sizes.
    * 0-dim integer tensors: sum. Python ints: kept when all are equal and they are not the sizes, such as
      an index of the batch; otherwise summed. Return a count that may be equal by chance as a tensor.
    * What is equal everywhere (None, strings, bools, a shared tensor): kept. NumPy arrays: as tensors.
    * Dicts, tuples, lists, named tuples and dataclasses: item by item.

    Args:
        outputs: One entry per micro-batch, in order.
        sizes: Samples of each micro-batch.

    Raises:
        ConfigurationError: Something fits none of these. Names where, and the method to override.

    Example:
        >>> merge_outputs([{"loss": 1.0, "ids": ["a", "b"]}, {"loss": 4.0, "ids": ["c"]}], [2, 1])
        {'loss': 2.0, 'ids': ['a', 'b', 'c']}
    """
    assert len(outputs) == len(sizes), "one output for each micro-batch"
    if len(outputs) == 1:
        return outputs[0]
    return _merge(list(outputs), list(sizes), "output")


def _merge(values: list[Any], sizes: list[int], where: str) -> Any:
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _merge_tensors(values, sizes, where)
    if all(isinstance(value, np.ndarray | np.generic) for value in values):
        merged = _merge_tensors([torch.as_tensor(value) for value in values], sizes, where)
        return merged.numpy() if merged.ndim else merged.item()
    if all(_is_number(value) for value in values) and any(isinstance(value, float) for value in values):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    if any(type(value) is not type(first) for value in values):
        raise _cannot(where, f"its types differ: {', '.join(sorted({type(v).__name__ for v in values}))}")
    if _is_number(first):
        same = all(value == first for value in values) and values != sizes
        return first if same else sum(values)
    if is_list(first) and _are_samples(values, sizes):
        return type(first)(item for value in values for item in value)
    if items_of(first):
        return _merge_items(values, sizes, where)
    if all(_equal(value, first) for value in values):
        return first
    raise _cannot(where, f"its values of type {type(first).__name__} differ")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _merge_tensors(values: list[Tensor], sizes: list[int], where: str) -> Tensor:
    if all(value.dim() and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
        if len({value.shape[1:] for value in values}) > 1:  # as long as the longest text of each
            listed = ", ".join(str(tuple(value.shape)) for value in values)
            raise _cannot(where, f"its sizes beside the samples differ ({listed}): pad it to one size")
        return torch.cat(values)
    if all(value.dim() == 0 for value in values):
        return _merge_scalars(values, sizes, where)
    if all(_equal(value, values[0]) for value in values):
        return values[0]
    shapes = ", ".join(str(tuple(value.shape)) for value in values)
    raise _cannot(where, f"its shapes {shapes} do not begin with the micro-batch sizes {sizes}")


def _merge_scalars(values: list[Tensor], sizes: list[int], where: str) -> Tensor:
    if values[0].is_floating_point() or values[0].is_complex():
        weights = torch.tensor(sizes, dtype=values[0].dtype, device=values[0].device)
        return (torch.stack(values) * weights).sum() / weights.sum()
    if values[0].dtype is torch.bool:
        if any(bool(value != values[0]) for value in values):
            raise _cannot(where, "its truth values differ")
        return values[0]
    return torch.stack(values).sum()


def _are_samples(values: list[Any], sizes: list[int]) -> bool:
    """Whether each is a list with an item per sample, or a tuple of dictionaries, which are never stacked."""
    if any(len(value) != size for value, size in zip(values, sizes, strict=True)):
        return False
    items = [(item, size) for value, size in zip(values, sizes, strict=True) for item in value]
    batched = [is_batched(item, size) for item, size in items]
    if isinstance(values[0], tuple):
        if all(map(are_texts, values, sizes)):
            return any(value != values[0] for value in values)
        return are_objects([item for item, _ in items]) and not all(batched)
    if not any(batched) or all(batched):
        return not any(batched)
    return are_alike([item for item, _ in items]) and (len(set(sizes)) > 1 or not _are_columns(values, sizes))


def _are_columns(values: list[Any], sizes: list[int]) -> bool:
    """Whether what stands at one place in each has a row per sample, or the same shapes everywhere."""
    for column in zip(*values, strict=True):
        by_rows = all(is_batched(item, size) for item, size in zip(column, sizes, strict=True))
        shapes = {tuple(tuple(array.shape) for array in arrays_in(item)) for item in column}
        if not by_rows and len(shapes) > 1:
            return False
    return True


def _merge_items(values: list[Any], sizes: list[int], where: str) -> Any:
    keys = [list(value) if isinstance(value, Mapping) else len(items_of(value)) for value in values]
    if any(key != keys[0] for key in keys):
        raise _cannot(where, "its keys or lengths differ")
    columns = iter(list(zip(*(items_of(value) for value in values), strict=True)))
    return rebuilt(values[0], lambda _, key: _merge(list(next(columns)), sizes, f"{where}[{key!r}]"))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, deque | list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(_equal, one, other))
    return bool(one is other or one == other)


def _cannot(where: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"what the step returned for the micro-batches cannot be merged at {where}: {why}; override "
        f"`merge_outputs(outputs, sizes)` on the LightningModule"
    )
