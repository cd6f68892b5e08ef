"""A device whose memory the host cannot read: torch's key for extensions, with bytes kept in CPU storages.

Every operator runs on the CPU's kernels, but only on tensors of the device: one that mixes it with host
tensors is refused, as CUDA refuses it, and so is Python code that asks for a tensor's memory. What reads a
value to the host is counted. Importing this module changes nothing; `register` is for a process of its own.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

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


class Stream:
    """The device works while the host waits, so there is nothing to order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing is under way."""

    def wait_stream(self, other: "Stream") -> None:
        """Nothing is under way."""


class _Module(backend_registration._DummyBackendModule):
    """What `torch.island` is."""

    Stream = Stream

    def current_stream(self, device: object = None) -> Stream:
        return Stream()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass

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
        serial_backend.SerialGroup.memory = staticmethod(
            lambda tensor: on_host(tensor) if is_here(tensor) else tensor
        )
        serial_backend.register(NAME)


def is_here(value: object) -> bool:
    """Whether this is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def on_host(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of the device, as a CPU tensor that shares them."""
    shared = torch.empty(0, dtype=tensor.dtype)
    storage = _storages[tensor.untyped_storage()._cdata]
    return shared.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[arg-type]


def _made(cpu: Tensor) -> Tensor:
    base = torch._C._acc.create_empty_tensor((0,), cpu.dtype)
    _storages[base.untyped_storage()._cdata] = cpu.untyped_storage()
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
        result = operator(*host_args, **host_kwargs)
    for cpu, tensor in pairs:
        _resize(tensor, cpu)
    memory = {cpu.untyped_storage()._cdata: tensor for cpu, tensor in pairs}

    def up(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        base = memory.get(value.untyped_storage()._cdata)
        return _made(value) if base is None else _view(base, value)

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
    return _made(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return _made(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    here = source
    if is_here(source):
        here = on_host(source)
        if not is_here(into):
            reads.append(tuple(source.shape))
    (on_host(into) if is_here(into) else into).copy_(here)
    return into


def _copy_from(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(into, source)


def _to(
    tensor: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Tensor:  # fmt: skip
    here = on_host(tensor) if is_here(tensor) else tensor
    made = here.to(dtype=dtype or here.dtype, copy=True)
    if device is not None and torch.device(device).type == "cpu":
        reads.append(tuple(tensor.shape))
        return made
    return _made(made)


def _item(tensor: Tensor) -> Any:
    reads.append(tuple(tensor.shape))
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
