"""What a unit costs, read off the operations of its traced forward."""

from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_pipeline._torch import TorchDispatchMode
from lightning_pipeline.model.tensors import operands_of

FLOPS_PER_BYTE = 16.0  # operations whose time equals moving one byte; a round figure for CPUs and GPUs alike


class Work(NamedTuple):
    """One operation of a forward.

    Attributes:
        flops: Floating-point operations.
        num_bytes: Read and written.
        dtype: Of what it computes.
        weighs: Whether one of its operands is a parameter that is trained.
        stated: Whether one of them is a parameter or buffer.
    """

    flops: float
    num_bytes: float
    dtype: torch.dtype = torch.float32
    weighs: bool = False
    stated: bool = False

    @property
    def cost(self) -> float:
        """Equivalent FLOPs, memory traffic counted in."""
        return max(self.flops, self.num_bytes * FLOPS_PER_BYTE)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    count: Any = sdpa_flop_count  # untyped in torch 2.13
    return int(count(query.shape, key.shape, value.shape))


def _recurrent_flops(data: Any, *args: Any, **kwargs: Any) -> int:
    """Two operations for each weight and row of the input (time and batch), whatever kind of cell it is."""
    given = (
        args[0] if isinstance(args[0], list | tuple) else args[:2]
    )  # a list on CUDA; biases have one dimension
    weights = [tensor for tensor in given if tensor.dim() == 2]
    rows = data.numel() // data.shape[-1]
    count: int = 2 * rows * sum(weight.numel() for weight in weights)
    return count


def _grouped_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Every row of the left side is multiplied with one of the right side's matrices."""
    count: int = 2 * left.numel() * right.shape[-1]
    return count


# torch's counter has no formula for attention on CPU and so counts none of its work (torch 2.13)
_OWN_FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable: _attention_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,  # nn.LSTM on CPU
    torch.ops.aten._cudnn_rnn: _recurrent_flops,
}
_MEANS_OVER_CLASSES = (torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward)
_MEAN = 1


def work_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    *,
    weighs: bool = False,
    stated: bool = False,
) -> Work:
    """What one operation computes and moves.

    A view or a look at metadata moves nothing; an embedding reads the rows that it is asked for.
    """
    packet, flops = getattr(func, "overloadpacket", func), _flops_of(func, args, kwargs, result)
    if getattr(func, "is_view", False) or getattr(func, "namespace", "") == "prim":  # asks for metadata
        return Work(flops, 0.0, _dtype_of(result), weighs, stated)
    written = sum(t.numel() * t.element_size() for t in operands_of((result,)))
    read = written if packet is torch.ops.aten.embedding else _bytes_of(args)
    return Work(flops, float(read + written), _dtype_of(result), weighs, stated)


def _flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    packet = getattr(func, "overloadpacket", func)
    if packet in _OWN_FORMULAS:
        return float(_OWN_FORMULAS[packet](*args, **kwargs))
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0.0


class Flops(TorchDispatchMode):
    """Counts what runs inside. torch's own counter looks for the module of each operation, which takes longer
    than many an operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += _flops_of(func, args, kwargs or {}, result)
        return result


def _bytes_of(args: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in operands_of(args))


def _dtype_of(result: Any) -> torch.dtype:
    return next((tensor.dtype for tensor in operands_of((result,))), torch.float32)


def left_out_by(func: Any, args: tuple[Any, ...]) -> int | None:
    """Which class the mean of a loss over classes leaves out; None for any other operation."""
    if getattr(func, "overloadpacket", None) not in _MEANS_OVER_CLASSES:
        return None
    _, _, _, reduction, left_out = args
    return int(left_out) if reduction == _MEAN else None


def has_class_weights(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is a mean of a loss over classes by weights of these."""
    return left_out_by(func, args) is not None and args[2] is not None
