"""The split backward: input gradients now (I), weight gradients later (W).

While a stage runs, the functions whose weight gradient is a matrix product (linear, convolution, embedding,
addmm) are rerouted to autograd functions whose backward computes the input gradient and queues what the
weight gradient needs. Everything else stays in the fused backward, and so does every gradient that is taken
in another backward than the stage's own: inside a unit's forward, or inside a backward. User code sees no
difference.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline._torch import (
    backward_number,
    function_modes,
    in_a_transform,
    in_forward_mode,
    plain_linear,
)
from lightning_pipeline.patching import all_undone, patch

Accumulation = Callable[[], Tensor]


@dataclass(slots=True)
class WeightQueue:
    """What the weight gradients of one micro-batch on one stage still need.

    Attributes:
        parameters: The parameters whose gradient is deferred, by identity.
        pending: What computes a contribution, and what tensors it needs, in the order of the backward.
        fused: What the input half computed for the same parameters, where they are also used otherwise.
        task: The backward whose weight gradients wait, by torch's number; None outside.
    """

    parameters: dict[int, Tensor] = field(default_factory=dict)
    pending: list[tuple[Tensor, Accumulation, tuple[Tensor, ...]]] = field(default_factory=list)
    fused: dict[int, Tensor] = field(default_factory=dict)
    task: int | None = None

    def waits(self, *parameters: Tensor | None) -> bool:
        """Whether a backward that comes to these parameters is to leave them for W.

        Not where it runs inside another, and not where a hook wants their gradients.
        """
        if self.task is None or backward_number() != self.task:
            return False
        return not any(_has_hooks(parameter) for parameter in parameters if parameter is not None)

    def defer(self, parameter: Tensor, compute: Accumulation, *needed: Tensor) -> None:
        """Leave a contribution to `parameter` for W; none where the step has frozen it since its forward.

        The node at which autograd adds to `.grad` asks the same when the backward comes to it.
        """
        if parameter.requires_grad:
            self.pending.append((parameter, compute, needed))

    def held(self) -> list[Tensor]:
        """The tensors that wait for W."""
        return [*(tensor for _, _, needed in self.pending for tensor in needed), *self.fused.values()]

    @contextmanager
    def collecting(self, roots: Sequence[Any]) -> Iterator[None]:
        """Defer in the backward from `roots`, and keep apart what it accumulates: W adds both in one go.

        A fused backward sums all uses of a parameter before it adds them to `.grad`; so does this, and the
        gradients are equal to the last bit.

        Args:
            roots: The edges of the graph at which the backward begins.
        """
        before = [(parameter, parameter.grad) for parameter in self.parameters.values()]
        for parameter, _ in before:
            parameter.grad = None
        handles = [root.node.register_prehook(self._begins) for root in roots]
        try:
            yield
        finally:
            self.task = None
            for handle in handles:
                handle.remove()
            for parameter, gradient in before:
                if parameter.grad is not None:
                    self.fused[id(parameter)] = parameter.grad
                parameter.grad = gradient

    def _begins(self, gradients: Any) -> None:
        if self.task is None:  # torch has no public name for this number (2.13)
            self.task = backward_number()

    def drain(self) -> None:
        """Compute the weight gradients and add them to `.grad`."""
        sums = self.fused
        with torch.no_grad():
            for parameter, compute, _ in self.pending:
                gradient = compute()
                known = sums.get(id(parameter))
                sums[id(parameter)] = gradient if known is None else known.add_(gradient)
            self.pending.clear()
            for key, gradient in sums.items():
                _accumulate(self.parameters[key], gradient)
        sums.clear()


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _cast_to(tensor: Tensor | None, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)


def _as_saved(parameter: Tensor, saved: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A weight with the values that its forward kept, in the graph where a backward makes one."""
    if not torch.is_grad_enabled():
        return saved
    now: Tensor = _cast_to(parameter, dtype)
    return now if now.data_ptr() == saved.data_ptr() else saved.detach() + (now - now.detach())


def _without_graph(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values alone: what waits for W would else keep the graph, and with it what the stage was sent."""
    return [tensor.detach() for tensor in tensors]


class _Linear(torch.autograd.Function):
    """`F.linear`. Backward formulas and their layouts are those of torch's addmm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightQueue, dtype: Any
    ) -> Tensor:
        ctx.parameters, ctx.queue, ctx.dtype = (weight, bias), queue, dtype
        cast = _cast_to(weight, dtype)
        ctx.save_for_backward(x, cast.detach())  # torch keeps a view: `.data = ...` leaves it where it was
        return plain_linear(x, cast, _cast_to(bias, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        parameter, bias = ctx.parameters
        flat = gradient.reshape(-1, gradient.shape[-1])
        if not ctx.queue.waits(parameter, bias):
            x, kept = ctx.saved_tensors
            weight = _as_saved(parameter, kept, ctx.dtype)
            of_weight = flat.t().mm(x.reshape(-1, x.shape[-1])).to(parameter.dtype)
            of_bias = None if bias is None else flat.sum(0).to(bias.dtype)
            return flat.mm(weight).view(x.shape), of_weight, of_bias, None, None
        x, weight = _without_graph(ctx.saved_tensors)
        inputs = x.reshape(-1, x.shape[-1])
        ctx.queue.defer(parameter, lambda: flat.t().mm(inputs).to(parameter.dtype), flat, inputs)
        if bias is not None:
            ctx.queue.defer(bias, lambda: flat.sum(0).to(bias.dtype), flat)
        result = flat.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return result, None, None, None, None


class _Addmm(torch.autograd.Function):
    """`torch.addmm(bias, x, weight)`, the linear layer of GPT-2."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, x: Tensor, weight: Tensor, queue: WeightQueue, dtype: Any) -> Tensor:
        ctx.parameters, ctx.queue, ctx.dtype = (weight, bias), queue, dtype
        cast = _cast_to(weight, dtype)
        ctx.save_for_backward(x, cast)
        return torch.addmm(_cast_to(bias, dtype), x, cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        parameter, bias = ctx.parameters
        if not ctx.queue.waits(parameter, bias):
            x, kept = ctx.saved_tensors
            weight = _as_saved(parameter, kept, ctx.dtype)
            of_weight = x.t().mm(gradient).to(parameter.dtype)
            return gradient.sum(0).to(bias.dtype), gradient.mm(weight.t()), of_weight, None, None
        x, weight = _without_graph(ctx.saved_tensors)
        ctx.queue.defer(parameter, lambda: x.t().mm(gradient).to(parameter.dtype), x, gradient)
        ctx.queue.defer(bias, lambda: gradient.sum(0).to(bias.dtype), gradient)
        return None, gradient.mm(weight.t()) if ctx.needs_input_grad[1] else None, None, None, None


class _Convolution(torch.autograd.Function):
    """Any of `F.conv1d` to `F.conv_transpose3d`, through torch's own backward with part of its outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightQueue, dtype: Any, options: Any
    ) -> Tensor:
        ctx.parameters, ctx.queue, ctx.dtype, ctx.options = (weight, bias), queue, dtype, options
        cast = _cast_to(weight, dtype)
        ctx.save_for_backward(x, cast)
        return torch.convolution(x, cast, _cast_to(bias, dtype), *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        parameter, bias = ctx.parameters
        sizes, options = None if bias is None else list(bias.shape), ctx.options
        waits = ctx.queue.waits(parameter, bias)
        saved = ctx.saved_tensors
        x, weight = _without_graph(saved) if waits else (saved[0], _as_saved(parameter, saved[1], ctx.dtype))

        def part(*mask: bool) -> Any:
            return torch.ops.aten.convolution_backward(gradient, x, weight, sizes, *options, list(mask))

        if not waits:
            result, of_weight, of_bias = part(True, True, bias is not None)
            of_bias = None if bias is None else of_bias.to(bias.dtype)
            return result, of_weight.to(parameter.dtype), of_bias, None, None, None
        ctx.queue.defer(
            parameter, lambda: part(False, True, False)[1].to(parameter.dtype), gradient, x, weight
        )
        if bias is not None:
            ctx.queue.defer(bias, lambda: part(False, False, True)[2].to(bias.dtype), gradient, x, weight)
        result = part(True, False, False)[0] if ctx.needs_input_grad[0] else None
        return result, None, None, None, None, None


class _Embedding(torch.autograd.Function):
    """`F.embedding`: its whole backward is a weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding: int, by_frequency: bool, queue: WeightQueue
    ) -> Tensor:
        ctx.parameter, ctx.queue, ctx.options = weight, queue, (padding, by_frequency)
        ctx.save_for_backward(indices)
        return torch.embedding(weight, indices, padding, by_frequency, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (indices,) = _without_graph(ctx.saved_tensors)
        parameter, (padding, by_frequency) = ctx.parameter, ctx.options

        def compute() -> Tensor:
            result: Tensor = torch.ops.aten.embedding_dense_backward(
                gradient, indices, parameter.shape[0], padding, by_frequency
            )
            return result

        if not ctx.queue.waits(parameter):
            return compute(), None, None, None, None
        ctx.queue.defer(parameter, compute, gradient, indices)
        return None, None, None, None, None


class Deferral:
    """Reroutes functions for the time that a stage runs.

    Attributes:
        queue: Where the micro-batch that is running puts its weight gradients.
    """

    def __init__(self) -> None:
        self.queue: WeightQueue | None = None
        self._instead: list[tuple[Any, str, Any]] = [
            (F, "linear", self._linear),
            (F, "embedding", self._embedding),
            (torch, "addmm", self._addmm),
            *((F, name, self._convolution(getattr(F, name), dims, transposed))
              for transposed, stem in ((False, "conv"), (True, "conv_transpose"))
              for dims in (1, 2, 3)
              for name in (f"{stem}{dims}d",)),
        ]  # fmt: skip

    @contextmanager
    def into(self, queue: WeightQueue) -> Iterator[None]:
        """Defer into `queue` while a forward, or a backward that recomputes, runs."""
        before, self.queue = self.queue, queue
        undo = all_undone([patch(*one) for one in self._instead])
        try:
            yield
        finally:
            self.queue = before
            undo()

    def _takes(self, *tensors: Tensor | None) -> bool:
        """Whether the gradients of these are ours to defer: plain leaves that need one and have no hooks."""
        if not torch.is_grad_enabled() or _under_modes() or _transformed():
            return False
        for tensor in tensors:
            if tensor is None:
                continue
            if not (type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_leaf and tensor.requires_grad):
                return False
            if _has_hooks(tensor):
                return False
        queue = self.queue
        assert queue is not None, "functions are rerouted only while a queue is set"
        for tensor in tensors:
            if tensor is not None:
                queue.parameters[id(tensor)] = tensor
        return True

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if type(input) is not Tensor or not self._takes(weight, bias):
            return plain_linear(input, weight, bias)
        dtype = _autocast_dtype(input)
        result: Tensor = _Linear.apply(_cast(input, dtype), weight, bias, self.queue, dtype)  # type: ignore[no-untyped-call]
        return result

    def _addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
        if options or type(mat1) is not Tensor or input.dim() != 1 or not self._takes(input, mat2):
            return _ADDMM(input, mat1, mat2, **options)
        dtype = _autocast_dtype(mat1)
        result: Tensor = _Addmm.apply(input, _cast(mat1, dtype), mat2, self.queue, dtype)  # type: ignore[no-untyped-call]
        return result

    def _embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if max_norm is not None or sparse or type(input) is not Tensor or not self._takes(weight):
            return _EMBEDDING(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        padding = (
            -1 if padding_idx is None else padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx
        )
        result: Tensor = _Embedding.apply(weight, input, padding, scale_grad_by_freq, self.queue)  # type: ignore[no-untyped-call]
        return result

    def _convolution(
        self, original: Callable[..., Tensor], dims: int, transposed: bool
    ) -> Callable[..., Tensor]:
        def convolution(
            input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
        ) -> Tensor:
            options = _convolution_options(dims, transposed, args, kwargs)
            batched = type(input) is Tensor and input.dim() == dims + 2
            if options is None or not batched or not self._takes(weight, bias):
                return original(input, weight, bias, *args, **kwargs)
            dtype = _autocast_dtype(input)
            result: Tensor = _Convolution.apply(_cast(input, dtype), weight, bias, self.queue, dtype, options)  # type: ignore[no-untyped-call]
            return result

        return convolution


def _transformed() -> bool:
    """Whether this runs in `torch.func.vmap`, `grad` and the like, or with forward-mode derivatives."""
    return in_a_transform() or in_forward_mode()


def _under_modes() -> bool:
    """Whether a mode of the user's sees the functions. Ours is in force again where a unit is recomputed."""
    return not all(getattr(mode, "passes_layers_on", False) for mode in function_modes())


_ADDMM, _EMBEDDING = torch.addmm, F.embedding
_PLAIN = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")


def _convolution_options(
    dims: int, transposed: bool, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """stride, padding, dilation, transposed, output_padding, groups as `torch.convolution` takes them."""
    given = dict(zip(_TRANSPOSED if transposed else _PLAIN, args, strict=False), **kwargs)
    if isinstance(given.get("padding"), str):
        return None

    def sizes(name: str, default: int) -> list[int]:
        value = given.get(name, default)
        return [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)

    return (
        sizes("stride", 1), sizes("padding", 0), sizes("dilation", 1), transposed, sizes("output_padding", 0),
        given.get("groups", 1),
    )  # fmt: skip


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)
