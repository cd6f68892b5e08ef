"""What a call of a unit is given and gives back, as one graph of objects that can be sent to another rank.

A unit may change what it is given: a cache of keys and values grows, an entry of a dictionary is set. So the
answer to a call has, beside the output, the new contents of every list, dictionary or object among the
arguments that changed; the caller's own objects get them. Tensors that did not change stay the caller's. What
the unit sets of its own attributes, such as a loss beside its output, is told too, and a call says in which
modes it is made.
"""

import io
import pickle
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import tree_leaves
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import is_placeholder

_GIVEN, _MADE, _NODE, _MODULE = range(4)
_DEVICES = ("cpu", "cuda")
_NO_NODES = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_OWN_OF_MODULES = frozenset(vars(nn.Module()))
Load = Callable[[tuple[int, Any]], Any]


@dataclass
class Packed:
    """A value, taken apart.

    Attributes:
        skeleton: All but the tensors, pickled.
        tensors: In the order in which they were met.
        nodes: What can be changed in place, in that order.
    """

    skeleton: bytes
    tensors: list[Tensor]
    nodes: list[Any]

    def digest(self) -> int:
        """A number that differs where values do."""
        crc = zlib.crc32(self.skeleton)
        for tensor in self.tensors:
            head = f"{tuple(tensor.shape)}{tensor.dtype}{tensor.requires_grad}".encode()
            crc = zlib.crc32(f"{checksum(tensor)}".encode(), zlib.crc32(head, crc))
        return crc


@dataclass
class Answer:
    """What a call gave.

    Attributes:
        skeleton: Output, and new contents of changed nodes, pickled.
        made: Tensors that are new.
        flows: Whether gradients flow from each of them.
        changed: New values of given tensors, by number.
    """

    skeleton: bytes
    made: list[Tensor]
    flows: list[bool]
    changed: dict[int, Tensor]


class _Pickler(pickle.Pickler):
    """Hands tensors, modules and known objects to `persistent`."""

    def __init__(self, file: io.BytesIO, persistent: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._persistent = persistent

    def persistent_id(self, obj: Any) -> Any:
        return self._persistent(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, load: Load) -> None:
        super().__init__(io.BytesIO(data))
        self._load = load

    def persistent_load(self, pid: tuple[int, Any]) -> Any:
        return self._load(pid)


def _dumped(value: Any, persistent: Callable[[Any], Any], what: str) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, persistent).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SplitError(
            f"{what} cannot be sent to the rank that has it: {error}. Give it what can be pickled, or do "
            "this inside `with trainer.strategy.whole_model():`"
        ) from error
    return file.getvalue()


class Values:
    """Takes values apart and puts them together.

    Args:
        root: Modules of it travel as their names.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(module): name for name, module in root.named_modules()}
        self._modules = dict(root.named_modules())

    def pack(self, value: Any, what: str) -> Packed:
        """Take a value apart.

        Args:
            value: Arguments of a call.
            what: For messages.

        Raises:
            SplitError: It has something that cannot be pickled, or a tensor that is not here.
        """
        tensors: list[Tensor] = []
        numbers: dict[int, int] = {}
        nodes: dict[int, Any] = {}

        def persistent(obj: Any) -> Any:
            if isinstance(obj, Tensor):
                if id(obj) not in numbers:
                    numbers[id(obj)] = len(tensors)
                    tensors.append(obj)
                return _GIVEN, numbers[id(obj)]
            if isinstance(obj, nn.Module):
                return (_MODULE, self._names[id(obj)]) if id(obj) in self._names else None
            if _is_node(obj):
                nodes.setdefault(id(obj), obj)
            return None

        skeleton = _dumped(value, persistent, what)
        if any(map(is_placeholder, tensors)):
            raise SplitError(f"{what} is called with a tensor that is on another stage")
        return Packed(skeleton, tensors, list(nodes.values()))

    def unpack(self, skeleton: bytes, tensors: Sequence[Tensor]) -> Any:
        """A copy of a packed value, around these tensors."""

        def load(pid: tuple[int, Any]) -> Any:
            return tensors[pid[1]] if pid[0] == _GIVEN else self._modules[pid[1]]

        return _Unpickler(skeleton, load).load()

    def answer(self, output: Any, given: Packed, before: "Before", unit: nn.Module, what: str) -> Answer:
        """Describe what a call gave.

        Args:
            output: Of the call.
            given: What it was called with.
            before: As that was.
            unit: That was called.
            what: For messages.
        """
        made: list[Tensor] = []
        numbers = {id(tensor): number for number, tensor in enumerate(given.tensors)}
        places = {id(node): number for number, node in enumerate(given.nodes)}
        made_numbers: dict[int, int] = {}

        def persistent(obj: Any) -> Any:
            if isinstance(obj, Tensor):
                if id(obj) in numbers:
                    return _GIVEN, numbers[id(obj)]
                if id(obj) not in made_numbers:
                    made_numbers[id(obj)] = len(made)
                    made.append(obj)
                return _MADE, made_numbers[id(obj)]
            if isinstance(obj, nn.Module):
                return (_MODULE, self._names[id(obj)]) if id(obj) in self._names else None
            return (_NODE, places[id(obj)]) if id(obj) in places else None

        contents = {number: _contents(given.nodes[number]) for number in before.changed_nodes()}
        attributes = before.set_attributes(unit)
        skeleton = _dumped((output, contents, attributes), persistent, what)
        changed = {number: given.tensors[number] for number in before.changed_tensors()}
        return Answer(skeleton, made, [tensor.requires_grad for tensor in made], changed)

    def apply(self, answer: Answer, made: Sequence[Tensor], given: Packed, unit: nn.Module) -> Any:
        """The output of a call, for a caller whose own arguments become what the call made of them.

        Args:
            answer: To the call.
            made: Its new tensors, on this rank.
            given: What this rank would have called it with.
            unit: That was called.
        """

        def load(pid: tuple[int, Any]) -> Any:
            kind, number = pid
            if kind == _MODULE:
                return self._modules[number]
            return {_GIVEN: given.tensors, _MADE: made, _NODE: given.nodes}[kind][number]

        output, contents, attributes = _Unpickler(answer.skeleton, load).load()
        modules = list(unit.modules())
        for (number, name), value in attributes.items():
            vars(modules[number])[name] = value
        for number, content in contents.items():
            _fill(given.nodes[number], content)
        for number, value in answer.changed.items():
            tensor = given.tensors[number]
            if tensor is not value:
                with torch.no_grad():
                    tensor.copy_(value)
        return output


class Before:
    """Arguments, and attributes of a unit, as they are before a call."""

    def __init__(self, given: Packed, unit: nn.Module) -> None:
        self._given = given
        self._attributes = _attributes(unit)
        self._contents = [_contents(node) for node in given.nodes]  # kept, so that no `id` is used again
        self._tensors = [_version(tensor) for tensor in given.tensors]

    def set_attributes(self, unit: nn.Module) -> dict[tuple[int, str], Any]:
        """By number of the module in the unit, and name: what is another object now, and can be sent."""
        missing = object()
        found = {}
        for place, value in _attributes(unit).items():
            if self._attributes.get(place, missing) is not value and _travels(value):
                found[place] = value
        return found

    def changed_nodes(self) -> list[int]:
        """Numbers of lists, dictionaries and objects with other contents now."""
        now = [_contents(node) for node in self._given.nodes]
        pairs = enumerate(zip(self._contents, now, strict=True))
        return [number for number, (old, new) in pairs if _marks(old) != _marks(new)]

    def changed_tensors(self) -> list[int]:
        """Numbers of tensors that were written into."""
        pairs = enumerate(zip(self._given.tensors, self._tensors, strict=True))
        return [number for number, (tensor, version) in pairs if _version(tensor) != version]


class Modes:
    """In which modes a unit is called: those of autograd, autocast and of its own modules.

    Args:
        unit: That is called.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.gradients, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES
        ]
        self.training = [module.training for module in unit.modules()]

    @contextmanager
    def entered(self, unit: nn.Module) -> Iterator[None]:
        """Run in these on another rank."""
        modules = list(unit.modules())
        before = [module.training for module in modules]
        for module, mode in zip(modules, self.training, strict=True):
            module.training = mode
        try:
            with ExitStack() as stack:
                for kind, enabled, dtype in self.autocast:
                    if enabled != torch.is_autocast_enabled(kind):
                        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                stack.enter_context(torch.inference_mode(self.inference))
                stack.enter_context(torch.set_grad_enabled(self.gradients))
                yield
        finally:
            for module, mode in zip(modules, before, strict=True):
                module.training = mode


def _attributes(unit: nn.Module) -> dict[tuple[int, str], Any]:
    return {
        (number, name): value
        for number, module in enumerate(unit.modules())
        for name, value in vars(module).items()
        if name not in _OWN_OF_MODULES
    }


def _travels(value: Any) -> bool:
    """Whether it is made of tensors, numbers and text alone."""
    leaves = tree_leaves(value)
    return all(isinstance(leaf, Tensor | int | float | complex | str | bytes | None) for leaf in leaves)


def _is_node(obj: Any) -> bool:
    if isinstance(obj, list | dict | set | deque):
        return True
    return hasattr(obj, "__dict__") and not isinstance(obj, _NO_NODES)


def _contents(node: Any) -> tuple[Any, Any]:
    """What is in a container, and the attributes of an object; some dictionaries have both."""
    items: Any = None
    if isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, list | set | deque):
        items = list(node)
    return items, dict(vars(node)) if hasattr(node, "__dict__") else None


def _marks(contents: tuple[Any, Any]) -> Any:
    items, attributes = contents
    seen = [tuple(map(id, item)) if isinstance(item, tuple) else id(item) for item in items or ()]
    return seen, {name: id(value) for name, value in (attributes or {}).items()}


def _fill(node: Any, contents: tuple[Any, Any]) -> None:
    items, attributes = contents
    if isinstance(node, dict | set):
        node.clear()
        node.update(items)
    elif isinstance(node, list | deque):
        node.clear()
        node.extend(items)
    if attributes is not None:
        vars(node).clear()
        vars(node).update(attributes)


def _version(tensor: Tensor) -> int:
    return checksum(tensor) if tensor.is_inference() else tensor._version


def checksum(tensor: Tensor) -> int:
    """A number that differs where values do."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return 0
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data) if values.numel() else 0


def portable(tensors: Iterable[Tensor]) -> list[tuple[Tensor, bool, bool]]:
    """Tensors as they are sent, on the CPU; whether a device had them; whether they require a gradient."""
    return [
        (
            tensor.detach().cpu().clone(memory_format=torch.preserve_format),
            tensor.device.type != "cpu",
            tensor.requires_grad,
        )
        for tensor in tensors
    ]


def arrived(tensors: Iterable[tuple[Tensor, bool, bool]], device: torch.device) -> list[Tensor]:
    """Those that another rank has sent."""
    found = [tensor.to(device) if moves else tensor for tensor, moves, _ in tensors]
    for tensor, (_, _, flows) in zip(found, tensors, strict=True):
        if flows:
            tensor.requires_grad_()
    return found


def arrived_by_number(
    tensors: Mapping[int, tuple[Tensor, bool, bool]], device: torch.device
) -> dict[int, Tensor]:
    """The same, by number."""
    return dict(zip(tensors, arrived(list(tensors.values()), device), strict=True))
