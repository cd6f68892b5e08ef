"""Placeholders: tensors with a shape, dtype and device but no values, for what other stages compute.

They are PyTorch's fake tensors in a mode of our own. Glue may do anything with them that does not need a
value; everything else is told to a watcher, which raises our error or, while tracing, records it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import FakeTensor, FakeTensorMode
from lightning_pipeline.model.tensors.shape_rules import real_masks_counted, shapes_by_rule
from lightning_pipeline.model.tensors.structure import TensorSpec

_LIBRARIES = (
    "torch",
    "lightning",
    "lightning_pipeline",
    "lightning_fabric",
    "pytorch_lightning",
    "torchmetrics",
)
Operation = Any


class Watcher(Protocol):
    """Sees every operation that has a placeholder among its operands."""

    def placeholder_operation(
        self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run the operation by `run()` and return its result, or raise."""
        ...


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
                return base(func, types, args, kwargs)
            made = tuple(self.make(one) if isinstance(one, TensorSpec) else one for one in made)
            return made if len(made) > 1 else made[0]

        return run() if watcher is None else watcher.placeholder_operation(func, args, kwargs, run)

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


def is_placeholder(tensor: Any) -> bool:
    """Whether this is a tensor without values."""
    return isinstance(tensor, FakeTensor)


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's memory, shared by all of its views."""
    return int(tensor.untyped_storage()._cdata)


_WRITES: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}


def written_tensors(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The operands that an operator writes in place, from its schema."""
    found = _WRITES.get(func)
    if found is None:
        arguments = getattr(func, "_schema", None)
        written = [
            (index, argument)
            for index, argument in enumerate(arguments.arguments if arguments is not None else ())
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        positions = tuple(index for index, argument in written if not argument.kwarg_only)
        found = _WRITES[func] = (positions, tuple(argument.name for _, argument in written))
    for index in found[0]:
        if index < len(args):
            yield from operands_of((args[index],))
    for name in found[1]:
        if name in kwargs:
            yield from operands_of((kwargs[name],))


def operands_of(args: Iterable[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, or its results: such a value is one, or has a list."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))


def user_line(root: nn.Module | None = None) -> str:
    """Where in the user's code we are: `file:line in function`, and the module whose method that is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _LIBRARIES:
            function = named_function(frame)
            first = function.f_code.co_varnames[:1] if function.f_code.co_argcount else ()
            owner = _module_name(root, function.f_locals.get(*first) if first else None)
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {function.f_code.co_name}"
            return f"{place} ({owner})" if owner else place
        frame = frame.f_back
    return "code outside the module"


def named_function(frame: FrameType) -> FrameType:
    """Of a comprehension or generator the function around it, where that is what runs it."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename == frame.f_code.co_filename:
        if not outer.f_code.co_name.startswith("<"):
            return outer
        outer = outer.f_back
    return frame


def _module_name(root: nn.Module | None, owner: Any) -> str:
    if not isinstance(owner, nn.Module):
        return ""
    if root is not None:
        for name, module in root.named_modules():
            if module is owner:
                return f"module '{name}'" if name else type(owner).__name__
    return type(owner).__name__
