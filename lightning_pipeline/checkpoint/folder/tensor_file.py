"""Writes safetensors files one tensor after the other: no copy of the weights is made."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.errors import CheckpointError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
Shape = tuple[Sequence[int], torch.dtype]


def check_kinds(shapes: Mapping[str, Shape]) -> None:
    """Refuse data types that the format has no name for.

    Raises:
        CheckpointError: With the tensors' names.
    """
    lost = [f"{name} is {dtype}" for name, (_, dtype) in shapes.items() if dtype not in _NAMES]
    if lost:
        raise CheckpointError(f"{', '.join(lost)}, which safetensors does not know")


def write_tensors(
    path: Path,
    shapes: Mapping[str, Shape],
    get: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file, and make it last.

    Args:
        path: New, or written over.
        shapes: Sizes and data type of each tensor, by name; known to the format.
        get: Gives a tensor when its turn has come.
        metadata: Of the file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (sizes, dtype) in shapes.items():
        end = offset + torch.Size(sizes).numel() * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(sizes), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            for piece in _bytes_of(get(name)):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel():
        yield flat.view(torch.uint8).numpy().data
