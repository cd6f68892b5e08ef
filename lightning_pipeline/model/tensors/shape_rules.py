"""What a tensor is but for its values, and shapes that torch does not work out without them.

A mask, or the lengths of sequences, come from the batch more often than not. Every stage has the batch, so
how many elements such a mask selects is known on every stage, whether or not the values are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline._torch import FakeTensor

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_OF_SHAPE = (
    _aten.full_like.default, _aten.zeros_like.default, _aten.ones_like.default,
    _aten.new_full.default, _aten.new_zeros.default, _aten.new_ones.default,
)  # fmt: skip
_BY_INDEX = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


class TensorSpec(NamedTuple):
    """Everything about a tensor but its values. `stride` is None where the memory has gaps or overlaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Describe `tensor`."""
        stride = tensor.stride() if _is_dense(tensor) else None
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device.type, tensor.requires_grad)

    def resized(self, shape: tuple[int, ...]) -> "TensorSpec":
        """The same in another shape, with the elements in order."""
        if shape == self.shape:
            return self
        stride, following = [], 1
        for size in reversed(shape):
            stride.append(following)
            following *= size
        return self._replace(shape=shape, stride=tuple(reversed(stride)))

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def real_masks_counted(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operation, with the places that real masks select instead of these masks.

    Args:
        func: The operator.
        args: `h[mask]` has (h, [mask]).
    """
    if func not in _BY_INDEX or not any(map(_is_real_mask, args[1])):
        return args
    places: list[Any] = []
    for index in args[1]:
        places.extend(index.nonzero(as_tuple=True) if _is_real_mask(index) else [index])
    return args[0], places, *args[2:]


def by_shape_alone(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operation whose result depends on the shape of a placeholder alone: a real one.

    Args:
        func: The operator.
        args: `zeros_like(h)` has (h,).
    """
    if func not in _OF_SHAPE or not isinstance(args[0], FakeTensor):
        return args
    like = args[0]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made, *args[1:]


def shapes_by_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The results of an operation that has a rule here, each described or real; None where it has none."""
    rule = _RULES.get(func)
    return None if rule is None else rule(*args, **kwargs)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _is_real_mask(value: Any) -> bool:
    return _is_real(value) and value.dtype in _MASKS


def _described(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> TensorSpec:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * max(size, 1))
    stride = tuple(strides[: len(shape)])
    return TensorSpec(shape, stride, dtype or tensor.dtype, tensor.device.type, False)


def _grouped_mm(
    self: Tensor, mat2: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> tuple[TensorSpec]:
    """Each of several matrices times its own rows (or columns) of another; `offs` says where these end.

    torch's own rule (2.13) takes bfloat16 only, the kernel float32 too.
    """
    rows, columns = self.shape[-2], mat2.shape[-1]
    groups = [offs.shape[0]] if self.dim() == mat2.dim() == 2 else list(mat2.shape[:-2])
    shape = (*groups, rows, columns) if self.dim() == mat2.dim() else (rows, columns)
    return (_described(self, shape, out_dtype),)


def _masked_select(self: Tensor, mask: Tensor) -> tuple[TensorSpec] | None:
    if not _is_real(mask):
        return None
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    return (_described(self, (int(mask.expand(shape).sum()),)),)


def _pack_padded_sequence(
    input: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[TensorSpec, Tensor] | None:
    """Rows of all sequences, the longest first, step by step; and how many sequences have each step."""
    if not _is_real(lengths):
        return None
    steps = torch.arange(int(lengths.max()))
    batch_sizes = (lengths[None, :] > steps[:, None]).sum(1)
    return _described(input, (int(lengths.sum()), *input.shape[2:])), batch_sizes


_RULES: dict[Any, Callable[..., tuple[Any, ...] | None]] = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten.masked_select.default: _masked_select,
    _aten._pack_padded_sequence.default: _pack_padded_sequence,
}
