"""A batch out of shapes written down, for a plan without data."""

import re
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.errors import ConfigurationError

_SPEC = re.compile(r"\s*(\d+(?:\s*,\s*\d+)*)\s*(?::\s*(\w+))?\s*")


def made_up_batch(spec: Any) -> Any:
    """Tensors of the shapes that a specification gives: zeros in whole numbers, normal numbers in others.

    Args:
        spec: `"8,2048:int64"` for a tensor, float32 where no type is named; lists and dictionaries of such.

    Raises:
        ConfigurationError: Something in it is no shape.

    Example:
        >>> {name: value.dtype for name, value in made_up_batch({"x": "8,32", "y": "8:int64"}).items()}
        {'x': torch.float32, 'y': torch.int64}
    """
    if isinstance(spec, dict):
        return {name: made_up_batch(value) for name, value in spec.items()}
    if isinstance(spec, list | tuple):
        return type(spec)(made_up_batch(value) for value in spec)
    found = _SPEC.fullmatch(str(spec))
    dtype = getattr(torch, found[2] or "float32", None) if found is not None else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise ConfigurationError(
            f"batch={spec!r} is no shape: write sizes and a type, such as '8,2048:int64', or a list or "
            "dictionary of them"
        )
    return _filled([int(size) for size in found[1].split(",")], dtype)


def _filled(shape: list[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)
