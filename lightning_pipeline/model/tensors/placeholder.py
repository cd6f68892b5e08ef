"""Placeholders: tensors with a shape, dtype and device but no values, for what other stages compute.

They are PyTorch's fake tensors in a mode of our own. Glue may do anything with them that does not need a
value; everything else is told to a watcher, which raises our error or, while tracing, records it.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import FakeTensorMode
from lightning_pipeline.model.tensors.operations import Operation, is_placeholder, written_tensors
from lightning_pipeline.model.tensors.shape_rules import TensorSpec, real_masks_counted, shapes_by_rule


class Watcher(Protocol):
    """Sees every operation that has a placeholder among its operands."""

    def placeholder_operation(
        self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run the operation by `run()` and return its result, or raise."""
        ...


_REAL = (Tensor, nn.Parameter)


def _knows_by_shapes(func: Operation, args: tuple[Any, ...]) -> bool:
    """Whether the result depends on no value of `args`, and none of them is written."""
    if func is torch.ops.aten.t.default:
        return True
    return any(map(is_placeholder, args)) and next(written_tensors(func, args, {}), None) is None


class PlaceholderMode(FakeTensorMode):
    """A fake-tensor mode whose operations pass through the current `watcher`, or the `idle` one."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.watcher: Watcher | None = None
        self.idle: Watcher | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlaceholderMode":
        """A copy of a placeholder stands for a value of the same stages."""
        return self

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation on a placeholder."""
        watcher, kwargs = self.watcher or self.idle, kwargs or {}
        base, args = super().dispatch, real_masks_counted(func, args)

        def run() -> Any:
            made = shapes_by_rule(func, args, kwargs)
            if made is None:
                return base(func, types, self._all_without_values(func, args), kwargs)
            made = tuple(self.make(one) if isinstance(one, TensorSpec) else one for one in made)
            return made if len(made) > 1 else made[0]

        return run() if watcher is None else watcher.placeholder_operation(func, args, kwargs, run)

    def _all_without_values(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Operands with fake tensors for weights, which torch would make of them, too, but later.

        What an operation makes of fake tensors alone it knows from the last time; else it takes it apart
        again, which is a fifth of a small model's trace. Not where it may compute with values, or writes.
        """
        if not any(type(value) in _REAL for value in args) or not _knows_by_shapes(func, args):
            return args
        convert = self.fake_tensor_converter.from_real_tensor
        return tuple(
            convert(self, value) if type(value) in _REAL and value.dim() else value for value in args
        )

    def make(self, spec: TensorSpec) -> Tensor:
        """A fresh placeholder like `spec`; where that requires a gradient, it is no leaf of autograd."""
        watchers = self.watcher, self.idle
        self.watcher = self.idle = None
        try:
            with self, torch.inference_mode(False):
                stride = spec.stride
                shape = spec.shape
                options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
                made = (
                    torch.empty(shape, **options)
                    if stride is None
                    else torch.empty_strided(shape, stride, **options)
                )
                if spec.requires_grad:
                    with torch.enable_grad():
                        made = alias(made.requires_grad_())
            return made
        finally:
            self.watcher, self.idle = watchers

    def forget(self) -> None:
        """Let go of real tensors that were operands: none can move to another device while it is known."""
        self.fake_tensor_converter = type(self.fake_tensor_converter)()

    def like(self, tensor: Tensor) -> Tensor:
        """A fresh placeholder in the place of a real tensor."""
        return self.make(TensorSpec.of(tensor))


class _Alias(torch.autograd.Function):
    """The same memory as a tensor of its own in the graph, which may be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def alias(leaf: Tensor) -> Tensor:
    """A non-leaf that shares the memory of `leaf` and passes its gradient on.

    A plain view of a leaf must not be written in place, and models modify hidden states in place.
    """
    result: Tensor = _Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return result
