"""Placeholders: tensors with a shape, dtype and device but no values, for what other stages compute.

They are PyTorch's fake tensors in a mode of our own. Glue may do anything with them that does not need a
value; everything else is told to a watcher, which raises our error or, while tracing, records it.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    NoDispatch,
    has_composite_kernel,
    in_a_transform,
)
from lightning_pipeline.model.tensors.operations import (
    Operation,
    is_placeholder,
    operands_of,
    storage_key,
    written_tensors,
)
from lightning_pipeline.model.tensors.shape_rules import TensorSpec, real_masks_counted, shapes_by_rule


class Watcher(Protocol):
    """Sees every operation that has a placeholder among its operands."""

    def placeholder_operation(
        self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run the operation by `run()` and return its result, or raise."""
        ...


_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_REAL = (Tensor, nn.Parameter)
_MOST = 4096
_PLAIN = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_DECIDED_BY_VALUES = (
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,
)  # fmt: skip
_NOT_REMEMBERED = ("aten::_unsafe_view", "aten::lift_fresh", "aten::lift_fresh_copy")  # nor by torch


class _Form(NamedTuple):
    """Everything about a plain tensor but its values and its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


_FORMS: dict[Hashable, _Form] = {}
_REMEMBERED: dict[Operation, bool] = {}


def _form(value: Any) -> _Form | None:
    """Of a placeholder or a real tensor; None of other kinds of tensors, and of other things."""
    if type(value) is FakeTensor:
        if value.constant is not None:
            return None
    elif type(value) not in _REAL or value.is_meta:
        return None
    if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        return None
    return _Form(
        value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad
    )


def _is_remembered(func: Operation) -> bool:
    """Whether an operation of torch's own gives one tensor by the forms of its operands alone."""
    found = _REMEMBERED.get(func)
    if found is None:
        schema = getattr(func, "_schema", None)
        found = _REMEMBERED[func] = (
            schema is not None
            and schema.name.startswith("aten::")
            and schema.name not in _NOT_REMEMBERED
            and [str(one.type) for one in schema.returns] == ["Tensor"]
            and not any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
            and func.is_view == (schema.returns[0].alias_info is not None)
            and not any(tag in func.tags for tag in _DECIDED_BY_VALUES)
            and not has_composite_kernel(func)
        )
    return found


def _asked(mode: FakeTensorMode, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What the form of a result follows from; None where that is not placeholders and constants alone."""
    if not _is_remembered(func):
        return None
    parts: list[Hashable] = [func, *kwargs]
    if not _add_asked(mode, parts, (*args, *kwargs.values())):
        return None
    return (*parts, torch.get_default_dtype(), torch.is_inference_mode_enabled())


def _add_asked(mode: FakeTensorMode, parts: list[Hashable], values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            form = _form(value) if value.fake_mode is mode else None
            if form is None:
                return False
            parts.append(form)
        elif kind in _PLAIN:
            parts.append((kind, value))  # 1, 1.0 and True are equal
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _add_asked(mode, parts, value):
                return False
        else:
            return False
    return True


def _is_new(func: Operation, made: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a result is of memory of its own or, of a view, of that of the first operand."""
    key = storage_key(made)
    if func.is_view:
        return is_placeholder(args[0]) and key == storage_key(args[0])
    return all(key != storage_key(one) for one in operands_of(args, kwargs))


def _knows_by_shapes(func: Operation, args: tuple[Any, ...]) -> bool:
    """Whether the result depends on no value of `args`, and none of them is written."""
    if func is torch.ops.aten.t.default:
        return True
    return any(map(is_placeholder, args)) and next(written_tensors(func, args, {}), None) is None


def _is_of_numbers(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is given real integers alone, or makes some of none."""
    operands = list(operands_of(args, kwargs))
    if not operands:
        return _makes_integers(func, args, kwargs)
    return all(type(one) is Tensor and not one.is_meta for one in operands) and not any(
        one.is_floating_point() or one.is_complex() for one in operands
    )


def _makes_integers(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation makes a tensor of integers of nothing, such as `torch.arange(5)`."""
    if torch.Tag.nondeterministic_seeded in func.tags or "device" not in _arguments_of(func):
        return False
    kept = {**kwargs, "device": "meta", "pin_memory": None}
    with NoDispatch():
        made = func(*args, **{name: kept[name] for name in kept if name in _arguments_of(func)})
    return not (made.is_floating_point() or made.is_complex())


def _arguments_of(func: Operation) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _of_torch(base: Callable[..., Any], *operation: Any) -> Any:
    """What torch gives. An error that it logs it raises, too, and runs ahead of a batch may end so."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        return base(*operation)
    finally:
        _LOG.disabled = before


class PlaceholderMode(FakeTensorMode):
    """A fake-tensor mode whose operations pass through the current `watcher`, or the `idle` one."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.watcher: Watcher | None = None
        self.idle: Watcher | None = None
        self._counted: dict[int, Tensor] | None = None  # what was counted, by its memory

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What is made of real integers alone has values here, such as the lengths of packed sequences.

        Nothing else is written: not the integers of a batch.
        """
        before, self._counted = self._counted, {}
        try:
            yield
        finally:
            self._counted = before

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlaceholderMode":
        """A copy of a placeholder stands for a value of the same stages."""
        return self

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation on a placeholder."""
        watcher, kwargs = self.watcher or self.idle, kwargs or {}
        base, args = super().dispatch, real_masks_counted(func, args)

        def run() -> Any:
            if self._counted is not None and _is_of_numbers(func, args, kwargs):
                written = [storage_key(one) for one in written_tensors(func, args, kwargs)]
                if all(key in self._counted for key in written):
                    return self._count(self._counted, func, args, kwargs)
            made = shapes_by_rule(func, args, kwargs)
            if made is None:
                return self._known(base, func, types, self._all_without_values(func, args), kwargs)
            made = tuple(self.make(one) if isinstance(one, TensorSpec) else one for one in made)
            return made if len(made) > 1 else made[0]

        return run() if watcher is None else watcher.placeholder_operation(func, args, kwargs, run)

    def _count(
        self, counted: dict[int, Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The values that an operation gives."""
        with NoDispatch():
            result = func(*args, **kwargs)
        given = set(map(storage_key, operands_of(args, kwargs))) - counted.keys()
        made = {storage_key(one): one for one in operands_of((result,), {})}
        counted.update({key: one for key, one in made.items() if key not in given})
        return result

    def _known(
        self, base: Callable[..., Any], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What an operation gives. torch takes 0.12 ms to find what it gave before, this a sixth of that."""
        key = _asked(self, func, args, kwargs)
        if key is None:
            return _of_torch(base, func, types, args, kwargs)
        form = _FORMS.get(key)
        if form is not None:
            return self._of_form(form, args[0] if func.is_view else None)
        made = _of_torch(base, func, types, args, kwargs)
        if len(_FORMS) > _MOST:
            _FORMS.clear()
        form = _form(made)
        if form is not None and not made.requires_grad and _is_new(func, made, args, kwargs):
            _FORMS[key] = form
        return made

    def _of_form(self, form: "_Form", viewed: Tensor | None = None) -> Tensor:
        """A tensor without values, of its own memory or that of another placeholder."""
        with NoDispatch(), DisableTorchFunction():
            made = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
            if viewed is not None or form.offset:
                memory = made if viewed is None else viewed
                made.set_(memory.untyped_storage(), form.offset, form.shape, form.stride)
            if form.requires_grad:
                made.requires_grad_()
            placeholder: Tensor = FakeTensor(self, made, form.device)
        return placeholder

    def _all_without_values(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Operands with fake tensors for weights, which torch would make of them, too, but later.

        What an operation makes of fake tensors alone it knows from the last time; else it takes it apart
        again, which is a fifth of a small model's trace. Not where it may compute with values, or writes.
        """
        if not any(type(value) in _REAL for value in args) or not _knows_by_shapes(func, args):
            return args
        return tuple(
            self._without_values(value) if type(value) in _REAL and value.dim() else value for value in args
        )

    def _without_values(self, tensor: Tensor) -> Tensor:
        """A placeholder in the place of an operand; torch's takes 0.1 ms, and of a view 0.5 ms."""
        form = None if in_a_transform() else _form(tensor)
        if form is None:
            converted: Tensor = self.fake_tensor_converter.from_real_tensor(self, tensor)
            return converted
        return self._of_form(form)

    def make(self, spec: TensorSpec) -> Tensor:
        """A fresh placeholder like `spec`; where that requires a gradient, it is no leaf of autograd."""
        with torch.inference_mode(False):
            with NoDispatch(), DisableTorchFunction():
                options: dict[str, Any] = {"dtype": spec.dtype, "device": "meta"}
                shape, stride = spec.shape, spec.stride
                bare = (
                    torch.empty(shape, **options)
                    if stride is None
                    else torch.empty_strided(shape, stride, **options)
                )
                made: Tensor = FakeTensor(self, bare, torch.device(spec.device))
            if spec.requires_grad:
                with torch.enable_grad():
                    made = _Rooted.apply(torch.zeros((), device="meta", requires_grad=True), [made])  # type: ignore[no-untyped-call]
        return made

    def forget(self) -> None:
        """Let go of real tensors that were operands: none can move to another device while it is known."""
        self.fake_tensor_converter = type(self.fake_tensor_converter)()

    def like(self, tensor: Tensor) -> Tensor:
        """A fresh placeholder in the place of a real tensor."""
        return self.make(TensorSpec.of(tensor))

    def part(self, base: Tensor, tensor: Tensor) -> Tensor:
        """A placeholder in the place of a real tensor, in the memory of another one."""
        watchers = self.watcher, self.idle
        self.watcher = self.idle = None
        try:
            with self, torch.inference_mode(False), torch.enable_grad():
                made = base.detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                return alias(made.requires_grad_()) if tensor.requires_grad else made
        finally:
            self.watcher, self.idle = watchers


class _Rooted(torch.autograd.Function):
    """A tensor that was just made, as no leaf of autograd."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, made: list[Tensor]) -> Tensor:
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


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
