"""Results of glue on placeholders, kept from micro-batch to micro-batch: a fake operation takes 0.2 ms."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.tensors.operations import is_placeholder

_MOST = 4096
_CHANGING = frozenset({Tensor.register_hook, Tensor.retain_grad, Tensor.backward})
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
_WRITING = frozenset(
    ("__set__", "__delete__", "__setitem__", "__setstate__", *(f"__i{name}__" for name in _OPERATORS.split()))
)
_PLAIN = (int, float, str, torch.dtype, torch.device, torch.memory_format, type(None), type(...))
_EXACTLY = frozenset({bool, *_PLAIN})


class PlaceholderCache:
    """Placeholders that stay the same from one micro-batch to the next, and what glue makes of them.

    A function of such placeholders and of constants alone gives a placeholder that has no values either, so
    that the one of the micro-batch before serves again, in a run of the step without units too. Where glue
    changes one of them in place, nothing is remembered on this stage from then on.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}  # held, so that no identity is used twice
        self._results: dict[Hashable, Tensor] = {}
        self._off = False
        self._lasts = True  # what the function that runs gives

    def keep(self, placeholder: Tensor) -> None:
        """This one stands for the same value of every micro-batch of its shape."""
        if len(self._kept) > _MOST:
            self._kept.clear()
            self._results.clear()
        self._kept[id(placeholder)] = placeholder

    def writes(self, tensor: Tensor) -> None:
        """An operation changes this tensor in place."""
        self._lasts = False
        if id(tensor) in self._kept or id(tensor._base) in self._kept:
            self._off = True
            self._results.clear()

    def goes_by_run(self) -> None:
        """What the function that runs gives is for this run of the step alone, which has a part in it.

        It answers in the place of values, or notes what its later answers go by: another run has others.
        """
        self._lasts = False

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function between units, or answer with what it gave before.

        Args:
            func: Not a random one.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        if (
            args and isinstance(args[0], Tensor) and id(args[0]) not in self._kept
        ):  # the common case, kept short
            return func(*args, **kwargs)
        key = None if self._off else self._key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        found = self._results.get(key)
        if found is None:
            self._lasts = True
            found = func(*args, **kwargs)
            if is_placeholder(found) and self._lasts and id(found) not in self._kept:
                self.keep(found)
                self._results[key] = found
        return found

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What the result depends on; None where that is not placeholders and constants alone."""
        kept, placed = self._kept, False
        parts: list[Hashable] = [func, *kwargs]
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if id(value) not in kept:
                    return None
                placed = True
                parts.append(id(value))
            elif type(value) in _EXACTLY or isinstance(value, _PLAIN):
                parts.append((type(value), value))  # 1, 1.0 and True are equal
            else:
                return None
        if not placed:
            return None
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, which may be another one later, as `grad` is
            return None
        if func in _CHANGING or _writes(name):
            self.writes(args[0])
            return None
        return (*parts, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *result_dtypes())


def _writes(name: str) -> bool:
    """Whether a function of this name changes a tensor: `add_`, `requires_grad_`, `__setitem__`."""
    return name in _WRITING if name.endswith("__") else name.endswith("_")


def result_dtypes() -> tuple[Hashable, ...]:
    """The settings outside an operation that decide the type of its result: default and autocast types."""
    cast_to = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in _device_types()]
    return torch.get_default_dtype(), *cast_to


@functools.cache
def _device_types() -> tuple[str, ...]:
    """Of the devices that this torch computes on, each of which has an autocast of its own."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
