"""One buffer for all tensors of a message: where each one lies, and views that look like them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.errors import MessageError

ALIGNMENT = 64


class TensorSpec(NamedTuple):
    """Metadata of a tensor, as far as the other end of a message has to know it.

    Args:
        shape: Sizes.
        stride: Elements between neighbours along each dimension, as it lies in the message.
        dtype: Element type.
        requires_grad: Whether a gradient may come back for it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def specs_of(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """Describe tensors as they will lie in a message.

    Dense tensors keep their strides (so `channels_last` travels); others become contiguous.

    Raises:
        MessageError: A value is sparse, nested or quantised, which has no place in a flat buffer.
    """
    return tuple([TensorSpec(tuple(t.shape), _stride_of(t), t.dtype, t.requires_grad) for t in tensors])


def _stride_of(tensor: Tensor) -> tuple[int, ...]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise MessageError(
            f"a value of type {type(tensor).__name__} with layout {tensor.layout} cannot cross a cut: make "
            f"it a dense tensor before the boundary, or move the boundary with partition=[...]"
        )
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


class Layout:
    """Where the tensors of a message lie in its buffer.

    Args:
        specs: The tensors in order.
        start: Bytes before the first one, for the header.
    """

    def __init__(self, specs: tuple[TensorSpec, ...], start: int) -> None:
        self.specs = specs
        self.free: list[Parcel] = []
        self._places: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        end = start
        for spec in specs:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + _numel(spec.shape) * spec.dtype.itemsize
            self._places.append((spec.dtype, spec.shape, spec.stride, begin // spec.dtype.itemsize))
        self.num_bytes = -(-end // ALIGNMENT) * ALIGNMENT

    @property
    def idle_bytes(self) -> int:
        """Size of the buffers that are kept to be filled again."""
        return len(self.free) * self.num_bytes

    def view(self, buffer: Tensor) -> list[Tensor]:
        """Look at a buffer as the tensors it holds; nothing is copied."""
        typed = {dtype: buffer.view(dtype) for dtype, *_ in self._places}
        return [
            typed[dtype].as_strided(shape, stride, offset) for dtype, shape, stride, offset in self._places
        ]


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class Parcel:
    """A buffer to send, with its views made once, so that it can be filled again.

    Args:
        layout: What it will hold.
        pinned: Whether to page-lock the buffer, for tensors of an accelerator.
    """

    def __init__(self, layout: Layout, *, pinned: bool) -> None:
        self.layout = layout
        with torch.inference_mode(False):  # it may be filled again under another mode
            self.buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self.views = layout.view(self.buffer)

    @classmethod
    def of(cls, layout: Layout, *, pinned: bool) -> "Parcel":
        """Take one that is no longer in flight, or make one."""
        return layout.free.pop() if layout.free else cls(layout, pinned=pinned)

    def fill(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors in; None leaves its place as it is."""
        for view, tensor in zip(self.views, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor.detach())

    def release(self) -> None:
        """Hand the buffer back once it is no longer in flight; one per layout is kept."""
        if not self.layout.free:
            self.layout.free.append(self)
