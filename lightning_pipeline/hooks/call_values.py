"""What a call of a unit is given and gives back, as one graph of objects that can be sent to another rank.

A unit may change what it is given: a cache of keys and values grows, an entry of a dictionary is set. So the
answer to a call has, beside the output, the new contents of every list, dictionary or object among the
arguments that changed; the caller's own objects get them. Tensors that did not change stay the caller's. What
the unit and hooks inside it set or fill elsewhere, such as a loss beside the output, is told too, and a call
says in which modes it is made.
"""

import io
import pickle
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.places import Reach, give_values, has_values, values_of
from lightning_pipeline.model.state import Unsent
from lightning_pipeline.model.tensors import is_placeholder, user_line
from lightning_pipeline.registry import named_parameters_of

_GIVEN, _MADE, _NODE, _MODULE, _STOOD, _FUNCTION = range(6)
_DEVICES = ("cpu", "cuda")
_NO_NODES = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_OF_LIGHTNING = frozenset(vars(LightningModule()))
_ALWAYS_SENT = frozenset({bool, int, float, complex, str, bytes, type(None)})
Load = Callable[[tuple[int, Any]], Any]


@dataclass
class Packed:
    """A value, taken apart.

    Attributes:
        skeleton: All but the tensors, pickled.
        tensors: In the order in which they were met.
        nodes: What can be changed in place, in that order.
        functions: Which cannot be sent, such as a lambda: each rank that makes the call has its own.
    """

    skeleton: bytes
    tensors: list[Tensor]
    nodes: list[Any]
    functions: list[Any]

    def sent(self, what: str) -> bytes:
        """All but the tensors, for a rank that makes no such call itself.

        Args:
            what: For messages.
        """
        if self.functions:
            raise SplitError(
                f"{what} is given {self.functions[0].__qualname__}, which cannot be sent to the rank that "
                f"has it: define it in a Python module, or let all ranks make the call [at {user_line()}]"
            )
        return self.skeleton

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
        skeleton: Output, new contents of changed nodes, and changes of what is in reach, pickled.
        made: Tensors that are new.
        flows: Whether gradients flow from each of them.
        changed: Which of these is the new value of a given tensor, by number.
        own: What was in the unit's reach before the call, on the rank where it ran.
    """

    skeleton: bytes
    made: list[Tensor]
    flows: list[bool]
    changed: dict[int, int]
    own: Reach | None = None

    def portable(self) -> tuple[Any, ...]:
        """As it is sent."""
        return self.skeleton, portable(self.made), self.flows, self.changed

    @classmethod
    def arrived(cls, sent: tuple[Any, ...], device: torch.device) -> "Answer":
        """That another rank has sent."""
        skeleton, made, flows, changed = sent
        new = [tensor.detach() for tensor in arrived(made, device)]
        return cls(skeleton, new, flows, changed)


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
        self._root = root
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
        functions: list[Any] = []

        def persistent(obj: Any) -> Any:
            if isinstance(obj, types.FunctionType) and not _is_found_by_name(obj):
                functions.append(obj)
                return _FUNCTION, (len(functions) - 1, obj.__qualname__)
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
        return Packed(skeleton, tensors, list(nodes.values()), functions)

    def unpack(self, given: Packed, tensors: Sequence[Tensor]) -> Any:
        """A copy of a packed value, around these tensors."""

        def load(pid: tuple[int, Any]) -> Any:
            kind, number = pid
            if kind == _FUNCTION:
                return given.functions[number[0]]
            return tensors[number] if kind == _GIVEN else self._modules[number]

        return _Unpickler(given.skeleton, load).load()

    def reach(self, unit: nn.Module, given: Packed) -> Reach:
        """What a call of a unit may change beside what it is given, as it stands now."""
        return Reach(self._root, unit, given.functions, _OF_LIGHTNING)

    def answer(self, output: Any, given: Packed, before: "Before", what: str) -> Answer:
        """Describe what a call gave.

        Args:
            output: Of the call.
            given: What it was called with.
            before: As that was, and what is in reach of the unit.
            what: For messages.
        """
        made: list[Tensor] = []
        numbers = {id(tensor): number for number, tensor in enumerate(given.tensors)}
        places = {id(node): number for number, node in enumerate(given.nodes)}
        made_numbers: dict[int, int] = {}

        def persistent(obj: Any) -> Any:
            if id(obj) in numbers:
                return _GIVEN, numbers[id(obj)]
            if id(obj) in places:
                return _NODE, places[id(obj)]
            if isinstance(obj, nn.Module):
                return (_MODULE, self._names[id(obj)]) if id(obj) in self._names else None
            stood = before.reach.place(obj)
            if stood is not None and (not isinstance(obj, Tensor) or is_placeholder(obj)):
                return _STOOD, (stood, None)
            if not isinstance(obj, Tensor):
                return None
            if id(obj) not in made_numbers:
                made_numbers[id(obj)] = len(made)
                made.append(obj if stood is None else obj.detach())
            number = made_numbers[id(obj)]
            return (_MADE, number) if stood is None else (_STOOD, (stood, number))

        contents = {number: _contents(given.nodes[number]) for number in before.changed_nodes()}
        changes = before.reach.changes().mapped(lambda one: one if self._can_be_sent(one) else Unsent(what))
        skeleton = _dumped((output, contents, changes), persistent, what)
        written = before.changed_tensors()
        changed = {number: len(made) + place for place, number in enumerate(written)}
        made += [given.tensors[number] for number in written]
        flows = [tensor.requires_grad for tensor in made]
        return Answer(skeleton, made, flows, changed, before.reach)

    def _can_be_sent(self, value: Any) -> bool:
        if type(value) in _ALWAYS_SENT or isinstance(value, Tensor):
            return True

        def persistent(obj: Any) -> Any:
            named = isinstance(obj, nn.Module) and id(obj) in self._names
            return (_MODULE, "") if named or isinstance(obj, Tensor) else None

        try:
            _dumped(value, persistent, "")
        except SplitError:
            return False
        return True

    def apply(self, answer: Answer, made: Sequence[Tensor], given: Packed, unit: nn.Module) -> Any:
        """The output of a call, for a caller whose own arguments become what the call made of them.

        Args:
            answer: To the call.
            made: Its new tensors, on this rank.
            given: What this rank would have called it with.
            unit: That was called.
        """
        reach = answer.own

        def load(pid: tuple[int, Any]) -> Any:
            kind, number = pid
            if kind == _MODULE:
                return self._modules[number]
            if kind == _STOOD:
                nonlocal reach
                place, value = number
                reach = reach or self.reach(unit, given)
                return reach.stood(place) if value is None else _own_or(reach.known(place), made[value])
            return {_GIVEN: given.tensors, _MADE: made, _NODE: given.nodes}[kind][number]

        output, contents, changes = _Unpickler(answer.skeleton, load).load()
        if changes:
            reach = reach or self.reach(unit, given)
            reach.do(changes, here=answer.own is not None)
        for number, content in contents.items():
            _fill(given.nodes[number], content)
        for number, place in answer.changed.items():
            tensor, value = given.tensors[number], made[place]
            if tensor is not value:
                with torch.set_grad_enabled(value.requires_grad):
                    tensor.copy_(value)
        return output


class Before:
    """Arguments, and what is in reach of a unit, as they are before a call."""

    def __init__(self, given: Packed, reach: Reach) -> None:
        self._given, self.reach = given, reach
        self._contents = [_contents(node) for node in given.nodes]  # kept, so that no `id` is used again
        self._tensors = [_version(tensor) for tensor in given.tensors]

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


def _own_or(own: Any, value: Tensor) -> Any:
    """What this rank has at a place, which may have a graph, if it is that of the rank of the unit."""
    if isinstance(own, nn.Parameter) or own is value:
        return own
    alike = (
        isinstance(own, Tensor)
        and not is_placeholder(own)
        and (own.shape, own.dtype) == (value.shape, value.dtype)
    )
    return own if alike and checksum(own) == checksum(value) else value


def _is_found_by_name(function: types.FunctionType) -> bool:
    """Whether another process finds it in its Python module."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _is_node(obj: Any) -> bool:
    if isinstance(obj, list | dict | set | deque) or has_values(obj):
        return True
    return hasattr(obj, "__dict__") and not isinstance(obj, _NO_NODES)


def _contents(node: Any) -> tuple[Any, Any]:
    """What is in a container, array or generator, and an object's attributes; some have both."""
    if has_values(node):
        return values_of(node), None
    items: Any = None
    if isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, list | set | deque):
        items = list(node)
    return items, dict(vars(node)) if hasattr(node, "__dict__") else None


def _marks(contents: tuple[Any, Any]) -> Any:
    items, attributes = contents
    if isinstance(items, bytes):
        return items
    seen = [tuple(map(id, item)) if isinstance(item, tuple) else id(item) for item in items or ()]
    return seen, {name: id(value) for name, value in (attributes or {}).items()}


def _fill(node: Any, contents: tuple[Any, Any]) -> None:
    items, attributes = contents
    if has_values(node):
        give_values(node, items)
    elif isinstance(node, dict | set):
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


def refusal_of_others(
    made: Iterable[Tensor], inputs: Iterable[Tensor], root: nn.Module, what: str
) -> SplitError | None:
    """The error for gradients that flow from what a call gave to what it was not given.

    Args:
        made: What it gave.
        inputs: Where gradients may flow to: the unit's arguments and weights.
        root: The LightningModule, which knows names.
        what: For messages.
    """
    ends = list(inputs)
    known = {id(tensor) for tensor in ends}
    other = next((leaf for leaf in _leaves(made, ends) if id(leaf) not in known), None)
    if other is None:
        return None
    names = {id(parameter): repr(name) for name, parameter in named_parameters_of(root)}
    return SplitError(
        f"gradients flow from what {what} gives to {names.get(id(other), 'a tensor')}, which is neither its "
        "own nor given to it: give it as an argument, or keep both in one unit with "
        f"PipelineStrategy(units=[...]) [at {user_line(root)}]"
    )


def _leaves(made: Iterable[Tensor], ends: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors that a backward would give gradients, if it goes no further than to some."""
    seen: set[Any] = {tensor.grad_fn for tensor in ends}
    pending: list[Any] = [tensor.grad_fn for tensor in made]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of a node that adds up a gradient
        if isinstance(leaf, Tensor):
            yield leaf
        pending.extend(before for before, _ in node.next_functions)
