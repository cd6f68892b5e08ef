"""A device whose memory the host cannot read: torch's key for extensions, with bytes kept in CPU storages.

Every operator runs on the CPU's kernels, but only on tensors of the device: one that mixes it with host
tensors is refused, as CUDA refuses it, and so is Python code that asks for a tensor's memory. What reads a
value to the host is counted. Importing this module changes nothing; `register` is for a process of its own.

`work_late` makes it a device that works later than the host asks, by streams: results are no numbers until
then, and memory that was let go of is filled with no numbers as soon as its stream may use it again.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from tests import streams
from tests.ranks import serial_backend

NAME = "island"
_as_strided = torch.ops.aten.as_strided.default
_set = torch.ops.aten.set_.source_Storage_storage_offset
_META = torch._C.DispatchKey.Meta  # kernels that change sizes and strides only
_MIXES = ("aten::copy_", "aten::_copy_from")

reads: list[tuple[int, ...]] = []
"""Shapes of the tensors that were read to the host."""
free_memory: list[int] = []
"""Bytes that the device says are free; it says nothing while this is empty."""
_storages: dict[int, torch.UntypedStorage] = {}  # by the address of the device's storage
_libraries: list[torch.library.Library] = []


late: list[bool] = []
"""Not empty while the device works later than the host asks."""
_let_go: list["_Memory"] = []


class _Module(backend_registration._DummyBackendModule):
    """What `torch.island` is."""

    Stream = streams.Stream
    Event = streams.Event

    def current_stream(self, device: object = None) -> streams.Stream:
        return streams.current()

    @contextlib.contextmanager
    def stream(self, stream: streams.Stream) -> Iterator[None]:
        with streams.using(stream):
            yield

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        streams.current().synchronize()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return (free_memory or [0])[-1], 2**34


def register() -> None:
    """Make the device known to this process, once."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        everything.fallback(_run, "PrivateUse1")
        for name, kernel in _KERNELS.items():
            aten.impl(name, kernel, "PrivateUse1")
        _libraries.extend((everything, aten))
        torch.Tensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
        torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign]
        serial_backend.SerialGroup.memory = staticmethod(
            lambda tensor: on_host(tensor) if is_here(tensor) else tensor
        )
        serial_backend.SerialGroup.works_late = staticmethod(lambda tensor: bool(late) and is_here(tensor))
        serial_backend.register(NAME)


def work_late(lanes: int) -> None:
    """From now on the device of this process works later than the host asks.

    Args:
        lanes: Queues that its streams share; 0: each has its own.
    """
    os.environ["LANES"] = str(lanes)
    streams.forget()
    late[:] = [True]


def work_at_once() -> None:
    """The device has done what it was given, and works while the host waits again."""
    if late:
        streams.current().synchronize()
    late.clear()
    _let_go.clear()


class _Memory:
    """Bytes of the device, and who uses them."""

    def __init__(self, base: Tensor, cpu: torch.UntypedStorage) -> None:
        self.of = StorageWeakRef(base.untyped_storage())
        self.cpu, self.streams = cpu, [streams.current()]

    def spoil(self) -> None:
        """The allocator gives it to the next one who asks, on the stream that it was made on."""
        own, *others = self.streams
        for other in others:
            own.wait_stream(other)
        own.queue.put(lambda: _spoil(self.cpu))


def _spoil(cpu: torch.UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8).set_(cpu).fill_(255)  # type: ignore[call-overload]


def _sweep() -> None:
    """Spoil what was let go of since the last time."""
    for memory in [memory for memory in _let_go if memory.of.expired()]:
        _let_go.remove(memory)
        memory.spoil()


def _record_stream(self: Tensor, stream: streams.Stream) -> None:
    address = self.untyped_storage()._cdata
    for memory in _let_go:
        if memory.of.cdata == address and stream not in memory.streams:
            memory.streams.append(stream)


def is_here(value: object) -> bool:
    """Whether this is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def on_host(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of the device, as a CPU tensor that shares them."""
    shared = torch.empty(0, dtype=tensor.dtype)
    storage = _storages[tensor.untyped_storage()._cdata]
    return shared.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[arg-type]


def made(cpu: Tensor) -> Tensor:
    """A tensor of the device over the bytes of a CPU tensor."""
    base = torch._C._acc.create_empty_tensor((0,), cpu.dtype)
    _storages[base.untyped_storage()._cdata] = cpu.untyped_storage()
    if late:
        _sweep()
        _let_go.append(_Memory(base, cpu.untyped_storage()))
    return _view(base, cpu)


def _view(base: Tensor, cpu: Tensor) -> Tensor:
    """A tensor of the device over the memory of `base`, of the sizes and strides of `cpu`."""
    if base.dtype != cpu.dtype:
        same = torch._C._acc.create_empty_tensor((0,), cpu.dtype)
        _set._op_dk(_META, same, base.untyped_storage(), 0, (0,), (1,))
        base = same
    seen: Tensor = _as_strided._op_dk(_META, base, cpu.size(), cpu.stride(), cpu.storage_offset())
    return seen


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the bytes, and wrap what it returns."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def down(value: Any) -> Any:
        if isinstance(value, Tensor) and is_here(value):
            pairs.append((on_host(value), value))
            return pairs[-1][0]
        return _allowed(operator, value)

    operator, args = _on_cpu(operator, args)
    host_args, host_kwargs = pytree.tree_map(down, (args, kwargs))
    with torch._C._AutoDispatchBelowAutograd():
        result = (_later if late else _now)(operator, host_args, host_kwargs)
    for cpu, tensor in pairs:
        _resize(tensor, cpu)
    memory = {cpu.untyped_storage()._cdata: tensor for cpu, tensor in pairs}

    def up(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        base = memory.get(value.untyped_storage()._cdata)
        return made(value) if base is None else _view(base, value)

    returns = operator._schema.returns
    if not returns:
        return None
    written = _written(operator, args, kwargs)
    results = (result,) if len(returns) == 1 else tuple(result)
    wrapped = tuple(
        written[next(iter(one.alias_info.before_set))]
        if one.alias_info is not None and one.alias_info.is_write
        else pytree.tree_map(up, value)
        for one, value in zip(returns, results, strict=True)
    )
    return wrapped[0] if len(returns) == 1 else wrapped


def _now(operator: Any, args: Any, kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def _later(operator: Any, args: Any, kwargs: Any) -> Any:
    """Let the current stream run an operator; what is returned is filled then, and is no number before."""
    schema, returns = operator._schema, operator._schema.returns
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    if not writes and any(one.alias_info is not None for one in returns):
        return operator(*args, **kwargs)  # a view: no byte is read
    outs = [kwargs[one.name] for one in schema.arguments if one.kwarg_only and one.is_out]
    sizes = schema.name in _SIZES or any(out.numel() == 0 for out in outs)  # it gets its size now
    in_place = all(one.alias_info is not None and one.alias_info.is_write for one in returns)
    draws = torch.Tag.nondeterministic_seeded in operator.tags
    if draws or sizes or schema.name in _WRITES or (writes and not in_place):
        streams.current().synchronize()
        return operator(*args, **kwargs)
    if writes:
        streams.current().queue.put(partial(operator, *args, **kwargs))
        return None if len(returns) == 1 else (None,) * len(returns)
    result = operator(*args, **kwargs)  # of what happens to be there: its sizes are right
    leaves = pytree.tree_leaves(result)
    if any(not isinstance(leaf, Tensor) for leaf in leaves if leaf is not None):
        streams.current().synchronize()
        return operator(*args, **kwargs)
    given = {one.untyped_storage()._cdata for one in pytree.tree_leaves((args, kwargs)) if _is_tensor(one)}
    if any(_is_tensor(leaf) and leaf.untyped_storage()._cdata in given for leaf in leaves):
        return result  # a view that the schema does not tell of
    for leaf in leaves:
        _blank(leaf)

    def run() -> None:
        for leaf, real in zip(leaves, pytree.tree_leaves(operator(*args, **kwargs)), strict=True):
            if leaf is not None:
                leaf.copy_(real)

    streams.current().queue.put(run)
    return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


_WRITES = ("aten::native_batch_norm",)
"""Operators that write what their schema does not tell of."""
_SIZES = ("aten::resize_", "aten::set_", "aten::resize_as_")


def _blank(tensor: Tensor | None) -> Tensor | None:
    """No number where there is such a thing; zero is an index that exists."""
    if tensor is not None and late:
        if tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(255 if tensor.dtype is torch.uint8 else 0)
    return tensor


def _do(operation: Any, *, reads_to_host: bool = False) -> None:
    """Now, or when the current stream comes to it."""
    if not late:
        operation()
    elif reads_to_host:
        streams.current().synchronize()
        operation()
    else:
        streams.current().queue.put(operation)


def _on_cpu(operator: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The operator that the CPU has for one that torch leaves to extensions."""
    if operator is torch.ops.aten.convolution_backward_overrideable.default:
        return torch.ops.aten.convolution_backward.default, (*args[:3], [args[2].shape[0]], *args[3:])
    if operator is torch.ops.aten.convolution_overrideable.default:
        return torch.ops.aten.convolution.default, args
    return operator, args


def _allowed(operator: Any, value: Any) -> Any:
    """An operand that is no tensor of the device."""
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    if late and isinstance(value, Tensor) and not value.dim():
        return value.clone()  # a number is handed over when the host says so
    if isinstance(value, Tensor) and value.dim() and operator.name() not in _MIXES:
        raise RuntimeError(
            f"{operator.name()}: expected all tensors to be on the same device, but found at least two "
            f"devices, cpu and {NAME}:0"
        )
    return value


def _resize(tensor: Tensor, cpu: Tensor) -> None:
    """Let a tensor of the device have the sizes that an operator has given its bytes."""
    sizes = cpu.size(), cpu.stride(), cpu.storage_offset()
    if sizes != (tensor.size(), tensor.stride(), tensor.storage_offset()):
        _set._op_dk(_META, tensor, tensor.untyped_storage(), sizes[2], sizes[0], sizes[1])


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The operands that an operator writes, by the names of their memory in its schema."""
    found: dict[str, Any] = {}
    for position, one in enumerate(operator._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(one.name)
            found.update(dict.fromkeys(one.alias_info.before_set, value))
    return found


def _empty(
    size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    cpu = torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format)
    _blank(cpu)
    return made(cpu)


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    cpu = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    _blank(cpu)
    return made(cpu)


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    to_host = is_here(source) and not is_here(into)
    if to_host:
        reads.append(tuple(source.shape))
    here = on_host(source) if is_here(source) else source.detach().clone()
    target = on_host(into) if is_here(into) else into
    _do(lambda: target.copy_(here), reads_to_host=to_host)
    return into


def _copy_from(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(into, source)


def _to(
    tensor: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Tensor:  # fmt: skip
    here = on_host(tensor) if is_here(tensor) else tensor.detach().clone()
    to_host = device is not None and torch.device(device).type == "cpu"
    if to_host and late:
        streams.current().synchronize()
    cpu = here.to(dtype=dtype or here.dtype, copy=True)
    if to_host:
        reads.append(tuple(tensor.shape))
        return cpu
    if late:
        _blank(cpu)
        _do(lambda: cpu.copy_(here))
    return made(cpu)


def _item(tensor: Tensor) -> Any:
    reads.append(tuple(tensor.shape))
    if late:
        streams.current().synchronize()
    return on_host(tensor).item()


_KERNELS = {
    "empty.memory_format": _empty, "empty_strided": _empty_strided, "copy_": _copy, "_copy_from": _copy_from,
    "_to_copy": _to, "_local_scalar_dense": _item,
}  # fmt: skip
_plain_deepcopy = torch.Tensor.__deepcopy__


def _deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
    """Torch copies a storage's memory by the host; devices that have none are copied by operators."""
    if not is_here(self):
        return _plain_deepcopy(self, memo)  # type: ignore[no-untyped-call]
    if id(self) not in memo:
        copy = self.detach().clone()
        is_parameter = isinstance(self, nn.Parameter)
        memo[id(self)] = (
            nn.Parameter(copy, self.requires_grad)
            if is_parameter
            else copy.requires_grad_(self.requires_grad)
        )
    return memo[id(self)]


class IslandAccelerator(Accelerator):
    """Every rank has a device of its own, which is number 0 to it."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return [torch.device(NAME, 0) for _ in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
