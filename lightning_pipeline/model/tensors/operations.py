"""What an operation is given, what it writes, and which of these tensors have no values."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import FakeTensor, TorchDispatchMode

Operation = Any
_aten = torch.ops.aten
_READ = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_READING = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
_WITHOUT_VALUES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "from_file")
_NOT_BY_FORM = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape)
_MASKS = (torch.bool, torch.uint8)


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
    """Inside, keeps the memory that operations write and have not made; `restore` puts its values back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {storage_key(one) for one in operands_of(args, kwargs) if _has_memory(one)}
        for written in filter(_has_memory, written_tensors(func, args, kwargs)):
            key = storage_key(written)
            if key not in self._before and key not in self._made:
                length = written.untyped_storage().nbytes() // written.element_size()
                memory = written.detach().as_strided((length,), (1,), 0)
                self._before[key] = memory, memory.clone()
        result = func(*args, **kwargs)
        self._made.update({storage_key(one) for one in operands_of((result,)) if _has_memory(one)} - known)
        return result

    def restore(self) -> None:
        """Put the values back."""
        for memory, before in self._before.values():
            if memory.untyped_storage().nbytes() != before.nbytes:
                memory.untyped_storage().resize_(before.nbytes)
            memory.copy_(before)
        self._before.clear()
        self._made.clear()


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (is_placeholder(tensor) or tensor.is_meta)


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


class FormSeen(TorchDispatchMode):
    """Sees whether all that is read from real tensors follows from sizes and whole numbers in the code.

    So it is with positions, `torch.arange(x.shape[1])`, what is computed from them alone, and whether all of
    that is zero. What comes from the batch, from weights or buffers, from lists or from a draw is not so, nor
    is anything once there is a tensor whose size follows from values (`mask.nonzero()`).

    Attributes:
        holds: Whether it does so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.holds = True
        self._known: dict[int, Tensor] = {}  # held, so that no storage's identity is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.holds:
            self._see(func, args, kwargs, result)
        return result

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        operands = [one for one in operands_of(args, kwargs) if not is_placeholder(one)]
        is_torchs = func.name().startswith("aten::")
        if operands and not (is_torchs and all(map(_is_plain, operands))):
            self.holds = False  # of other operations and tensors we know too little
            return
        known = all(map(self._is_known, operands))
        if func in _READ or not _READING.isdisjoint(func.tags):
            deciding = operands if func is not _aten.index.Tensor else _real_masks(args[1])
            self.holds = all(map(self._is_known, deciding))
        written = [tensor for tensor in written_tensors(func, args, kwargs) if not is_placeholder(tensor)]
        for tensor in written:
            self._known.pop(storage_key(tensor), None)
        made = list(operands_of((result,)))
        if is_torchs and known and not written and all(map(_is_plain, made)) and _follows(func, args, kwargs):
            self._known.update({storage_key(tensor): tensor for tensor in made})

    def _is_known(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._known


def _real_masks(places: Iterable[Tensor | None]) -> list[Tensor]:
    return [one for one in places if one is not None and one.dtype in _MASKS and not is_placeholder(one)]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _follows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of an operation follows from its operands. A fraction may be an attribute."""
    return (
        func._schema.name.removeprefix("aten::") not in _WITHOUT_VALUES
        and not any(tag in func.tags for tag in _NOT_BY_FORM)
        and not any(type(value) is float for value in (*args, *kwargs.values()))
    )
