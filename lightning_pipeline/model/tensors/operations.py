"""What an operation is given, what it writes, which of these tensors have no values, and what it costs."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipeline._torch import DisableTorchFunction, FakeTensor, TorchDispatchMode, set_version

Operation = Any
_aten = torch.ops.aten
_READ = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_BY_PYTHON = frozenset({Tensor.apply_, Tensor.map_, Tensor.map2_})
_ALIKE = (torch.allclose, Tensor.allclose)
_READING = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
_WITHOUT_VALUES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "from_file")
_NOT_BY_FORM = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape)
_MASKS = (torch.bool, torch.uint8)
GRADIENT: Any = cast(Any, Tensor).grad.__get__  # what a function mode sees where `.grad` is read
FLOPS_PER_BYTE = 16.0  # operations whose time equals moving one byte; a round figure for CPUs and GPUs alike


def is_placeholder(tensor: Any) -> bool:
    """Whether this is a tensor without values."""
    return isinstance(tensor, FakeTensor)


def read_of(func: Any, args: Any, kwargs: Any) -> str | bool | Tensor | None:
    """What a function gives for tensors without values where torch's own refuses or ends the process.

    Args:
        func: A function of tensors that is called: `f"{loss:.3f}"`, `torch.allclose`, `h.apply_(f)`.
        args: Of it.
        kwargs: Likewise.

    Returns:
        None for any other.
    """
    if func is Tensor.__format__ and is_placeholder(args[0]) and not args[0].dim() and args[1]:
        return format(args[0].detach().item(), args[1])
    if func in _ALIKE and any(map(is_placeholder, operands_of(args, kwargs or {}))):
        return bool(torch.isclose(*args, **(kwargs or {})).all())
    if func in _BY_PYTHON and any(map(is_placeholder, args[:3])):
        written: Tensor = args[0].copy_(args[0])  # each element is made of one
        return written
    return None


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and values, such as nan for labels that are missing."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other) or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's memory, shared by all of its views."""
    return int(memory_of(tensor)._cdata)


def memory_of(tensor: Tensor) -> UntypedStorage:
    """The memory of a tensor, or of the values of a sparse one."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage()
    dense = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return dense.untyped_storage()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 for one of inference mode, which does not count it."""
    return 0 if tensor.is_inference() else int(tensor._version)


_SHARED: MutableMapping[Tensor, list[ReferenceType[Tensor]]] = WeakIdKeyDictionary()


def set_values(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other values: in new memory, or in memory that is somebody else's, such as an array's.

    What is known to be in its memory too (`know_shared`) follows into the new one.
    """
    if not tensor.untyped_storage().resizable():
        tensor.data.copy_(value)
        return
    beside = _beside(tensor)
    if not beside:
        tensor.data = value.clone()
        return
    memory = tensor.untyped_storage().clone()
    for one in (tensor, *beside):
        _move(one, memory)
    tensor.data.copy_(value)


def move_back(tensor: Tensor, memory: Tensor) -> None:
    """Let a tensor be in the memory where it was, with what is known to be in its own now.

    Args:
        tensor: It.
        memory: Its `data` from then.
    """
    storage = memory.untyped_storage()
    for one in _beside(tensor):
        if _end_of(one) <= storage.nbytes():  # else it had memory of its own then
            _move(one, storage)
    tensor.data = memory


def _end_of(tensor: Tensor) -> int:
    """Where a tensor ends in its memory, in bytes."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _beside(tensor: Tensor) -> list[Tensor]:
    """Tensors that are in the memory of this one, as is known."""
    known = (one for held in _SHARED.get(tensor, ()) if (one := held()) is not None)
    return [one for one in known if storage_key(one) == storage_key(tensor)]


def _move(tensor: Tensor, memory: UntypedStorage) -> None:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor.data = empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def know_shared(tensors: Iterable[Tensor]) -> None:
    """Note which of these are in the memory of others of them, such as a table and a view of a row of it."""
    by_memory: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta and 0 not in tensor.stride():
            by_memory.setdefault(storage_key(tensor), {})[id(tensor)] = tensor
    for together in by_memory.values():
        for tensor in together.values() if len(together) > 1 else ():
            _SHARED[tensor] = [ref(one) for one in together.values() if one is not tensor]


def put_back(tensor: Tensor, value: Tensor, version: int) -> None:
    """Let a tensor have the values that it had at a version, also for a graph that has kept it from then."""
    tensor.data.copy_(value)
    _let_be_at(tensor, version)


def _let_be_at(tensor: Tensor, version: int) -> None:
    if version_of(tensor) != version:
        set_version(tensor, version)


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


_LISTS = (list, tuple)  # a union would be made anew for each value


def operands_of(args: Iterable[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, or its results: such a value is one, or has a list."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, _LISTS):
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


class _Watch(TorchDispatchMode):
    """Sees operations; what it does itself is no function of the step, of which others take note.

    Torch runs `torch.from_numpy(array)` without telling who watches functions, who then still watches here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():
            return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        raise NotImplementedError


class WritesUndone(_Watch):
    """Inside, keeps the memory that operations write and have not made; `restore` puts its values back."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, Tensor, Tensor, int]] = {}
        self._made: set[int] = set()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and keep what it writes."""
        known = {storage_key(one) for one in operands_of(args, kwargs) if _has_memory(one)}
        for written in filter(_has_memory, written_tensors(func, args, kwargs)):
            key = storage_key(written)
            if key not in self._before and key not in self._made:
                length = written.untyped_storage().nbytes() // written.element_size()
                memory = written.detach().as_strided((length,), (1,), 0)
                self._before[key] = memory, memory.clone(), written, version_of(written)
        result = func(*args, **kwargs)
        self._made.update({storage_key(one) for one in operands_of((result,)) if _has_memory(one)} - known)
        return result

    def restore(self) -> None:
        """Put the values back."""
        for memory, before, written, version in self._before.values():
            if memory.untyped_storage().nbytes() != before.nbytes:
                memory.untyped_storage().resize_(before.nbytes)
            memory.copy_(before)
            _let_be_at(written, version)  # which `memory`, made below autograd, counts apart
        self._before.clear()
        self._made.clear()


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (is_placeholder(tensor) or tensor.is_meta)


class WritesSeen(_Watch):
    """Notes which of some tensors operations write in place, and puts their values back.

    Args:
        tensors: To look after; placeholders among them are left out.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._held = {
            storage_key(tensor): tensor
            for tensor in tensors
            if tensor.layout is torch.strided and not (is_placeholder(tensor) or tensor.is_meta)
        }
        self._before: dict[int, tuple[Tensor, int]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and note what it writes."""
        for written in written_tensors(func, args, kwargs):
            key = storage_key(written)
            if key in self._held and key not in self._before:
                held = self._held[key]
                self._before[key] = held.detach().clone(), version_of(held)
        return func(*args, **kwargs)

    @property
    def written(self) -> list[int]:
        """Keys of the memory that was written."""
        return list(self._before)

    def restore(self) -> None:
        """Put the values back."""
        for key, (before, version) in self._before.items():
            put_back(self._held[key], before, version)


class FormSeen(_Watch):
    """Sees whether all that is read from real tensors follows from sizes and whole numbers in the code.

    So it is with positions, `torch.arange(x.shape[1])`, what is computed from them alone, and whether all of
    that is zero. What comes from the batch, from weights or buffers, from lists or from a draw is not so, nor
    is anything once there is a tensor whose size follows from values (`mask.nonzero()`).

    Attributes:
        holds: Whether it does so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holds = True
        self._known: dict[int, Tensor] = {}  # held, so that no storage's identity is used twice

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and look at what it reads."""
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
    """Scores, and what they weigh; keys and values may have fewer heads than queries."""
    scores = query.numel() // query.shape[-1] * key.shape[-2]
    return int(2 * scores * (query.shape[-1] + value.shape[-1]))


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


# torch's counter has no formula for attention on CPU and so counts none of its work (torch 2.13), and before
# 2.13 one for GPUs that refuses grouped queries
_OWN_FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_efficient_attention: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention: _attention_flops,
    torch.ops.aten._scaled_dot_product_cudnn_attention: _attention_flops,
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
