"""What a tensor is but for its values, and shapes that torch does not work out without them.

A mask, or the lengths of sequences, come from the batch more often than not. Every stage has the batch, so
how many elements such a mask selects is known on every stage, whether or not the values are.
"""

from collections.abc import Callable, Iterator, Sequence
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


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *options: Any
) -> tuple[TensorSpec, TensorSpec]:
    """A loss for each sample, and what the backward needs; without lengths as for the longest target."""
    steps, size = log_probs.shape[:2]
    known = not isinstance(target_lengths, Tensor) or _is_real(target_lengths)
    longest = max(map(int, target_lengths), default=0) if known else targets.shape[-1]
    return _described(log_probs, (size,)), _described(log_probs, (size, steps, 2 * longest + 1))


_RULES: dict[Any, Callable[..., tuple[Any, ...] | None]] = {
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss.default: _ctc_loss,
    _aten._grouped_mm.default: _grouped_mm,
    _aten.masked_select.default: _masked_select,
    _aten._pack_padded_sequence.default: _pack_padded_sequence,
}


# ---- lengths that values decide, assumed as long as they can be


def of_most(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Callable[[TensorSpec], Tensor],
    *, few: bool = False,
) -> Any:  # fmt: skip
    """What an operation returns whose length depends on values, as if all of them counted.

    Only a run without values may assume that: what is computed later has its own length.

    Args:
        func: The operator.
        args: `torch.nonzero(h)` has (h,), `h[mask]` has (h, [mask]).
        kwargs: Its keyword arguments.
        make: Makes a placeholder.
        few: Whether all values are taken to be alike, where the operation gives those that differ.

    Returns:
        None for an operator that is not known.
    """
    if counts_apart(func):
        return tuple(map(make, _APART[func](*args, few=few, **kwargs)))
    if func is _aten.index.Tensor and any(map(_is_unknown_mask, args[1])):
        places: list[Any] = []
        for index in args[1]:
            if _is_unknown_mask(index):
                spec = _described(index, (index.numel(),), torch.int64)
                places.extend(make(spec) for _ in range(index.dim()))
            else:
                places.append(index)
        return func(args[0], places, *args[2:], **kwargs)
    rule = _LONGEST.get(func) or _LONGEST_ELSEWHERE.get(func._schema.name)
    if rule is None:
        return None
    made = tuple(map(make, rule(*args, **kwargs)))
    return made if len(made) > 1 else made[0]


def counts_apart(func: Any) -> bool:
    """Whether an operation gives those of some values that differ."""
    return func in _APART


def chosen_by(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors whose values say how long the result of an operation is.

    Args:
        func: The operator.
        args: `h[mask]` has (h, [mask]).
    """
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    if func is _aten.index.Tensor:
        return [index for index in args[1] if isinstance(index, Tensor) and index.dtype in _MASKS]
    return [args[1] if func is _aten.masked_select.default else args[0]]


def _is_unknown_mask(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.dtype in _MASKS


def _all_places(self: Tensor) -> tuple[TensorSpec]:
    return (_described(self, (self.numel(), self.dim()), torch.int64),)


def _all_selected(self: Tensor, mask: Tensor) -> tuple[TensorSpec]:
    return (_described(self, (torch.broadcast_shapes(self.shape, mask.shape).numel(),)),)


def _different(
    self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False,
    *, few: bool,
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:  # fmt: skip
    number = _number(self.numel(), few)
    return (
        _described(self, (number,)),
        _described(self, tuple(self.shape) if return_inverse or return_counts else (0,), torch.int64),
        _described(self, (number,) if return_counts else (0,), torch.int64),
    )


def _different_in_turn(
    self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None,
    *, few: bool,
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:  # fmt: skip
    return _different_along(self, dim, return_inverse=return_inverse, return_counts=return_counts, few=few)


def _different_along(
    self: Tensor, dim: int | None, sorted: bool = True, return_inverse: bool = False,
    return_counts: bool = False, *, few: bool,
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:  # fmt: skip
    number = _number(self.numel() if dim is None else self.shape[dim], few)
    shape, places = (number,), tuple(self.shape)
    if dim is not None:
        dim %= self.dim()
        shape, places = (*self.shape[:dim], number, *self.shape[dim + 1 :]), (self.shape[dim],)
    return (
        _described(self, shape),
        _described(self, places if return_inverse else (0,), torch.int64),
        _described(self, (number,) if return_counts else (0,), torch.int64),
    )


def _number(values: int, few: bool) -> int:
    """How many of some values differ."""
    return min(values, 1) if few else values


def _counted(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> tuple[TensorSpec]:
    """As many numbers as were asked for at least, which are those of classes as a rule."""
    single = weights is not None and weights.dtype is torch.float32
    floating = torch.float32 if single else torch.float64
    dtype = torch.int64 if weights is None else floating
    return (_described(self, (minlength or self.numel(),), dtype),)


def _each_once(repeats: Tensor, *, output_size: int | None = None) -> tuple[TensorSpec]:
    return (_described(repeats, (repeats.numel() if output_size is None else output_size,), torch.int64),)


def _all_boxes(dets: Tensor, scores: Tensor, iou_threshold: float) -> tuple[TensorSpec]:
    return (_described(scores, (len(scores),), torch.int64),)


_LONGEST: dict[Any, Callable[..., tuple[TensorSpec, ...]]] = {
    _aten.nonzero.default: _all_places,
    _aten.masked_select.default: _all_selected,
    _aten.bincount.default: _counted,
    _aten.repeat_interleave.Tensor: _each_once,
}
_APART: dict[Any, Callable[..., tuple[TensorSpec, ...]]] = {
    _aten._unique2.default: _different,
    _aten.unique_consecutive.default: _different_in_turn,
    _aten.unique_dim.default: _different_along,
}
_LONGEST_ELSEWHERE: dict[str, Callable[..., tuple[TensorSpec, ...]]] = {"torchvision::nms": _all_boxes}


class Sizes(NamedTuple):
    """What is of another size in a batch.

    Attributes:
        now: For each size of the traced batch that is another one now, that.
        rows: Whether first dimensions alone differ, so that of `(3, 3)` the second is none of them.
    """

    now: dict[int, int]
    rows: bool


def sizes_between(traced: Any, now: Any) -> Sizes:
    """Which sizes of a traced batch are others now, from what `signature_of` gave for both."""
    found, rows = dict[int, int](), True
    for one, other, is_first in _pairs(traced, now):
        if one != other:
            found.setdefault(one, other)
            rows &= is_first
    return Sizes(found, rows)


def _pairs(one: Any, other: Any) -> Iterator[tuple[int, int, bool]]:
    if not (isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)):
        return
    is_first = True
    for a, b in zip(one, other, strict=True):
        if type(a) is int and type(b) is int:
            yield a, b, is_first
            is_first = False
        else:
            yield from _pairs(a, b)


def fitted(spec: TensorSpec, sizes: Sizes) -> TensorSpec:
    """A value's description with other sizes."""
    left = dict(sizes.now)
    if not any(size in left for size in spec.shape):
        return spec
    take = left.pop if sizes.rows else left.get
    return spec.resized(tuple(take(size, size) for size in spec.shape))


def sample_dimension(part: TensorSpec, whole: TensorSpec) -> int | None:
    """The one dimension in which the output for a micro-batch differs from that for the batch; else None."""
    if len(part.shape) != len(whole.shape):
        return None
    uneven = [d for d, sizes in enumerate(zip(part.shape, whole.shape, strict=True)) if len(set(sizes)) > 1]
    return uneven[0] if len(uneven) == 1 else None


def joined_in_blocks(parts: Sequence[Tensor], dimension: int, blocks: int) -> Tensor:
    """Values of micro-batches as one.

    Args:
        parts: For each micro-batch.
        dimension: Of the samples.
        blocks: How often all samples stand one after the other in it, as in joined views.
    """
    if blocks == 1:
        return torch.cat(list(parts), dimension)
    cut = [part.unflatten(dimension, (blocks, -1)) for part in parts]
    return torch.cat(cut, dimension + 1).flatten(dimension, dimension + 1)


def cut_in_blocks(whole: Tensor, dimension: int, blocks: int, start: int, length: int) -> Tensor:
    """The part of a micro-batch in values that `joined_in_blocks` has joined.

    Args:
        whole: All.
        dimension: Of the samples.
        blocks: How often all samples stand one after the other in it.
        start: Rows of the micro-batches before.
        length: Its rows.
    """
    if blocks == 1:
        return whole.narrow(dimension, start, length)
    cut: Tensor = whole.unflatten(dimension, (blocks, -1))
    part = cut.narrow(dimension + 1, start // blocks, length // blocks)
    return part.flatten(dimension, dimension + 1)
