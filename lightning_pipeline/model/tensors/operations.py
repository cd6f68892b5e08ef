"""What an operation is given, what it writes, and which of these tensors have no values."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline._torch import FakeTensor, TorchDispatchMode

Operation = Any


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


def standing_tensors(value: Any) -> Iterator[Tensor]:
    """A tensor, or those that stand in a list, tuple, deque or dictionary and no class of these."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple, deque, dict):
        yield from (t for t in (value.values() if type(value) is dict else value) if isinstance(t, Tensor))


SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
"""What `tensor.data = value` calls; made anew whenever somebody looks, so that it is compared by `==`."""


def data_set_without_values(func: Any, args: tuple[Any, ...], *, writes: bool = True) -> bool:
    """Do what can be done of `tensor.data = placeholder`, which would take the tensor's values away.

    Where the form stays it is what `tensor.copy_(placeholder)` is.

    Args:
        func: A function of torch that is called.
        args: Its arguments.
        writes: Whether it is a write; else, as of `weight.data = weight.data.to(device)` in a unit, nothing.

    Returns:
        Whether it was that.
    """
    if func != SET_DATA or is_placeholder(args[0]) or not is_placeholder(args[1]):
        return False
    tensor, value = args
    if writes and (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            tensor.detach().copy_(value)
    return True


class WritesUndone(TorchDispatchMode):
    """Inside, keeps the memory that operations write; `restore` puts its values back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in written_tensors(func, args, kwargs):
            is_real = written.layout is torch.strided and not (is_placeholder(written) or written.is_meta)
            if is_real and storage_key(written) not in self._before:
                memory = written.untyped_storage()
                self._before[storage_key(written)] = memory, memory.clone()
        return func(*args, **kwargs)

    def restore(self) -> None:
        """Put the values back."""
        for memory, before in self._before.values():
            memory.copy_(before)
        self._before.clear()


class WritesSeen(TorchDispatchMode):
    """Notes which of some tensors operations write in place, and puts their values back.

    Args:
        tensors: To look after; placeholders among them are left out.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = {
            storage_key(tensor): tensor
            for tensor in tensors
            if tensor.layout is torch.strided and not (is_placeholder(tensor) or tensor.is_meta)
        }
        self._before: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in written_tensors(func, args, kwargs):
            key = storage_key(written)
            if key in self._held and key not in self._before:
                self._before[key] = self._held[key].detach().clone()
        return func(*args, **kwargs)

    @property
    def written(self) -> list[int]:
        """Keys of the memory that was written."""
        return list(self._before)

    def restore(self) -> None:
        """Put the values back."""
        for key, before in self._before.items():
            self._held[key].data.copy_(before)
