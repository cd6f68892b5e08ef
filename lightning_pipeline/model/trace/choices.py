"""What the choice of units, and what a step leaves behind, may depend on beside shapes.

Numbers in the batch, attributes, and numbers that change between batches, such as `trainer.global_step`.
While a step is run to see what it does, numbers of a class of ours stand where those are. They compute as
plain ones do, and each comparison is noted as an expression of where its numbers stand. A later batch in
which all that was ever compared comes out as in one before goes the same way, and need not be looked at.
"""

import math
import operator
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline.model.places import MISSING, Effect, Memory, Numbers, Owner, Place
from lightning_pipeline.model.tensors import Tag, TagStore, filled_by, items_of, result_dtypes
from lightning_pipeline.patching import patched

Expression = tuple[Any, ...]
"""`("at", label)` for the number of a place; else a function's name and its operands, these or numbers."""
AT = "at"
INDEX = "the index of the batch"
SCALAR_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_MOST_OPPOSITE, _OTHERWISE_EACH, _ENDLESS = 20, 100, 20_000
_aten = torch.ops.aten
_NUMBERS = (int, float, bool)
_PLAIN = frozenset({bool, int, str})
_SIZED = frozenset({list, dict, set, deque})
_SHORT = 32  # up to here each length is a state of its own
_STATED = frozenset({*_PLAIN, float, complex, bytes, type(None)})
_UPDATES = "_update_count"  # where a metric counts its updates
_METHODS = frozenset({FunctionType, MethodType, partial})  # a split module has some in the place of its own
_HOOK_NOW = "_current_fx_name"  # where Lightning notes which hook runs
_MANY = 1000
_MOST_OPERANDS, _MOST_MADE = 40, 200
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"]
_COMPARED = ["eq", "ne", "lt", "le", "gt", "ge"]
_UNARY = ["neg", "pos", "abs", "invert"]
_GIVEN: dict[str, Callable[..., Any]] = {
    "bool": bool, "int": int, "float": float, "index": operator.index, "trunc": math.trunc,
    "floor": math.floor, "ceil": math.ceil, "round": round, "hash": operator.pos,
}  # fmt: skip
MADE_PLAIN = ("float", "hash")
"""What gives a number or a text of which nobody sees what it is compared with; most are logged."""
_FUNCTIONS = {name: getattr(operator, name) for name in (*_BINARY, *_COMPARED, *_UNARY)} | _GIVEN


class Decisions:
    """What code decides by the numbers that stand for others.

    Attributes:
        made: Each expression that was compared or given away, with what came out.
    """

    def __init__(self) -> None:
        self.made: dict[Expression, Any] = {}
        self._is_open, self._values = True, dict[str, Any]()
        self._computed: list[Noted] = []

    def stand_in(self, value: Any, label: str) -> Any:
        """What stands for a number.

        Args:
            value: The number.
            label: Of its place.
        """
        self._values[label] = value
        return self._noted(value, (AT, label))

    def sealed(self, value: int, label: str) -> "Sealed":
        """What stands for a number, and is none: code that takes it past its methods fails.

        Args:
            value: The number.
            label: Of its place.
        """
        self._values[label] = value
        made = Sealed()
        made.value = value
        made.decisions, made.expression, made.is_used = self, (AT, label), False
        return made

    def _seen_read(self, read: property) -> property:
        """A property that gives a number anew each time: one may go to where nobody sees it."""

        def get(owner: Any) -> Any:
            value = read.__get__(owner)
            if isinstance(value, Noted):
                self._computed.append(value := self._noted(value.plain(), value.expression))
            return value

        return property(get)

    def number(self, value: Any, expression: Expression) -> Any:
        """A number that was computed; too long an expression counts as decided by each of its numbers."""
        if not isinstance(value, _NUMBERS) or _size(expression) > _MOST_OPERANDS:
            self._note_leaves(expression)
            return value
        made = self._noted(value, expression)
        if isinstance(made, NotedInt):
            self._computed.append(made)
        return made

    def _noted(self, value: float, expression: Expression) -> "Noted":
        made = NotedFloat(value) if isinstance(value, float) else NotedInt(value)
        made.decisions, made.expression, made.is_used = self, expression, False
        return made

    def note(self, expression: Expression, result: Any) -> None:
        """Something was decided."""
        if self._is_open and len(self.made) < _MOST_MADE:
            self.made[expression] = result
        elif self._is_open:
            self._note_leaves(expression)

    def _note_leaves(self, expression: Expression) -> None:
        for leaf in leaves_of(expression):
            if self._is_open:
                self.made[leaf] = self._values[leaf[1]]

    def labels(self) -> set[str]:
        """Of the numbers that something was decided by."""
        return {leaf[1] for made in self.made for leaf in leaves_of(made)}

    @contextmanager
    def noting(self, places: Iterable[Place]) -> Iterator[None]:
        """Inside, numbers that note what is done with them stand in some places.

        Args:
            places: Those where a number stands are used.
        """
        held, readers = [], set[tuple[type, str]]()
        for place in places:
            value = place.get()
            if type(value) in _NUMBERS:
                held.append((place, value, one := self.stand_in(value, place.label)))
                place.put(one)
            if isinstance(place.owner, Numbers):
                readers.update(place.owner.readers)
        try:
            with ExitStack() as stack:
                for cls, name in readers:
                    stack.enter_context(patched(cls, {name: self._seen_read(vars(cls)[name])}))
                yield
        finally:
            for place, value, one in held:
                now = place.get()
                if now is one:
                    place.put(value)
                elif isinstance(now, Noted):
                    now.is_used = True
                    place.put(now.plain())
            for number in self._computed:  # to where nobody sees it, such as the index of a list
                if not number.is_used:
                    self.note(number.expression, number.plain())
            self._is_open = False
            self._computed.clear()


class Noted:
    """A number that notes what it is compared with.

    Attributes:
        decisions: Where it does so.
        expression: Of the places that it comes from.
        is_used: Whether what was done with it is known.
    """

    decisions: Decisions
    expression: Expression
    is_used: bool

    def plain(self) -> Any:
        """The number alone."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self._shown())

    def __repr__(self) -> str:
        return repr(self._shown())

    def __format__(self, how: str) -> str:
        return format(self._shown(), how)

    def _shown(self) -> Any:
        """As text it may be a key, or part of one: each number is another."""
        self.is_used = True
        self.decisions.note(("hash", self.expression), self.plain())
        return self.plain()

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        number: Any = self
        return number // other, number % other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.plain()), (self.plain(),)


class NotedInt(Noted, int):
    """A whole number, or a flag, that does."""

    def plain(self) -> int:
        """The number alone."""
        return int.__int__(self)


class NotedFloat(Noted, float):
    """A number with a fraction that does."""

    def plain(self) -> float:
        """The number alone."""
        return float.__float__(self)


class Sealed(Noted):
    """A whole number that C code cannot take the value of past these methods, as it does of an `int`.

    Attributes:
        value: The number.
    """

    value: int

    def plain(self) -> int:
        """The number alone."""
        return self.value


def holds_noted(value: Any) -> bool:
    """Whether such a number is among arguments of a function, where C code may take it past its methods."""
    if isinstance(value, list | tuple):
        return any(map(holds_noted, value))
    if isinstance(value, dict):
        return any(map(holds_noted, value.values()))
    if isinstance(value, slice):
        return holds_noted((value.start, value.stop, value.step))
    return isinstance(value, Noted)


def _operand(value: Any) -> Any:
    if isinstance(value, Noted):
        value.is_used = True
        return value.expression
    return value if type(value) in _NUMBERS else MISSING


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Noted) else value


def _binary(name: str, *, reflected: bool = False) -> Any:
    def compute(self: Noted, other: Any, *rest: Any) -> Any:
        if _operand(other) is MISSING or rest:  # a tensor computes itself
            self.is_used = True
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        expression = (name, *map(_operand, pair))
        value = _FUNCTIONS[name](*map(_plain, pair))
        if name in _COMPARED:
            self.decisions.note(expression, value)
            return value
        return self.decisions.number(value, expression)

    return compute


def _unary(name: str) -> Any:
    def compute(self: Noted) -> Any:
        self.is_used = True
        return self.decisions.number(_FUNCTIONS[name](self.plain()), (name, self.expression))

    return compute


def _given(name: str) -> Any:
    def give(self: Noted, *digits: Any) -> Any:
        self.is_used = True
        value = _FUNCTIONS[name](self.plain(), *digits)
        self.decisions.note((name, self.expression, *digits), value)
        return hash(value) if name == "hash" else value

    return give


for _kind, _like in ((NotedInt, int), (NotedFloat, float), (Sealed, int)):
    for _name in _BINARY:
        _own = _name.rstrip("_")
        if hasattr(_like, f"__{_own}__"):
            setattr(_kind, f"__{_own}__", _binary(_name))
            setattr(_kind, f"__r{_own}__", _binary(_name, reflected=True))
    for _name in _COMPARED:
        setattr(_kind, f"__{_name}__", _binary(_name))
    for _name in _UNARY:
        if hasattr(_like, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _unary(_name))
    for _name in _GIVEN:
        setattr(_kind, f"__{_name}__", _given(_name))


def leaves_of(expression: Any) -> Iterator[Expression]:
    """The places in an expression, each as an expression of its own."""
    if type(expression) is tuple and expression[0] == AT:
        yield expression
    elif type(expression) is tuple:
        for operand in expression[1:]:
            yield from leaves_of(operand)


def grown_in(expression: Any, within: str = "") -> Iterator[str]:
    """Labels of the places whose number an expression adds to or takes from.

    Args:
        expression: That was noted.
        within: The function whose operand the sum is; empty: any.
    """
    if type(expression) is not tuple or expression[0] == AT:
        return
    for operand in expression[1:]:
        if expression[0] in ("add", "sub") and not within:
            yield from (leaf[1] for leaf in leaves_of(operand))
        else:
            yield from grown_in(operand, "" if expression[0] == within else within)


def _size(expression: Any) -> int:
    return 1 + sum(map(_size, expression[1:])) if type(expression) is tuple else 1


def outcome(expression: Expression, at: Callable[[str], Any]) -> Any:
    """What an expression comes to now; None where no number does.

    Args:
        expression: That was noted.
        at: Gives the number that stands in a place, by label.
    """
    try:
        return _value(expression, at)
    except (ArithmeticError, TypeError, ValueError):
        return None


def _value(expression: Any, at: Callable[[str], Any]) -> Any:
    if type(expression) is not tuple:
        return expression
    name, *operands = expression
    if name == AT:
        value = at(operands[0])
        return value if type(value) in _NUMBERS else None
    return _FUNCTIONS[name](*[_value(operand, at) for operand in operands])


def with_noted_index(args: tuple[Any, ...], decisions: Decisions) -> tuple[Any, ...]:
    """Arguments of a step with an index of the batch that notes what is done with it."""
    index = index_of(args)
    return args if index is None else (args[0], decisions.stand_in(index, INDEX), *args[2:])


def with_sealed_index(args: tuple[Any, ...], decisions: Decisions) -> tuple[Any, ...]:
    """Arguments of a step with an index of the batch that is no number; see `Decisions.sealed`."""
    index = index_of(args)
    return args if index is None else (args[0], decisions.sealed(index, INDEX), *args[2:])


def index_of(args: Sequence[Any]) -> int | None:
    """The index of the batch among the arguments of a step; None where there is none."""
    return args[1] if len(args) > 1 and type(args[1]) is int else None


def numbers_beside(others: Iterable[Owner]) -> Iterator[Place]:
    """Places of numbers that a step may read beside the module."""
    for owner in others:
        if isinstance(owner, Numbers):
            for key in owner.read():
                yield owner.place(key)


def updates_of_metrics(root: nn.Module) -> list[Place]:
    """Places of the numbers of updates that metrics count: new ones each batch."""
    metrics = [(name, module) for name, module in root.named_modules() if isinstance(module, Metric)]
    return [Owner(vars(metric), f"{name}.").place(_UPDATES) for name, metric in metrics]


def numbers_changed(effects: Iterable[Effect]) -> Iterator[Place]:
    """Places of numbers that a step changes itself, those in dictionaries too; flags are known otherwise."""
    for effect in effects:
        value = effect.place.get()
        if type(value) is dict:
            inside = Owner(value, f"{effect.place.label}.")
            yield from (inside.place(key) for key, one in value.items() if type(one) in (int, float))
        elif type(value) in (int, float) and type(effect.place.owner) is not Memory:
            yield effect.place


def plain_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Numbers and strings of a micro-batch, without the index of the batch."""
    found: list[Hashable] = []
    _add_plain((args[:1], args[2:], dict(kwargs)), found)
    return tuple(found)


def _add_plain(value: Any, found: list[Hashable]) -> None:
    if isinstance(value, str | int | float):
        found.append(value)
    elif isinstance(value, list | tuple):  # before mappings, which take longer to tell
        for item in value if len(value) <= 1000 else ():
            _add_plain(item, found)
    elif type(value) is not Tensor and isinstance(value, Mapping):
        for item in value.values():
            _add_plain(item, found)


def plain_state(root: nn.Module, modules: Iterable[nn.Module], left_out: set[tuple[int, Any]]) -> Hashable:
    """Flags, whole numbers, strings and lengths that code between units may choose by, epoch and what runs.

    Validation before training (the Trainer's sanity check) and within it are two things that may run. Left
    out is what `updates_of_metrics` has.

    Args:
        root: The LightningModule.
        modules: Those whose attributes it may read.
        left_out: What the step itself changes: which `vars`, by its id, and the name.
    """
    running = getattr(getattr(root, "_trainer", None), "state", None)
    found: list[Hashable] = [getattr(root, "current_epoch", 0), getattr(running, "stage", None)]
    for module in modules:
        held = vars(module)
        plain = [pair for pair in held.items() if type(pair[1]) in _PLAIN]
        own, but = id(held), _UPDATES if isinstance(module, Metric) else None
        found += [pair for pair in plain if pair[0] != but and (own, pair[0]) not in left_out]
    sized = [(name, len(value)) for name, value in vars(root).items() if type(value) in _SIZED]
    found += [  # of a long one the binary digits, for it may grow for ever
        (name, length if length <= _SHORT else _SHORT + length.bit_length())
        for name, length in sized
        if (id(vars(root)), name) not in left_out
    ]
    return tuple(found)


def circumstances(root: nn.Module, others: Iterable[Owner]) -> str:
    """What a trace may depend on beside its batch: numbers and forms of tensors that the module holds, modes.

    Two that are equal say that nothing has changed which a step can choose by without reading a value; to
    take one trace for two steps, that has to be asked of the trace.

    Args:
        root: The LightningModule.
        others: What the step may change beside it; the numbers there count too.

    Returns:
        A digest of them: there are some for each module, and traces stay.
    """
    found: list[Any] = [_form(getattr(root, name, 0)) for name in ("current_epoch", "global_step")]
    found += [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), result_dtypes()]
    found += [(place.label, _form(place.get())) for place in numbers_beside(others)]
    for module in root.modules():
        found += [
            (name, _form(value))
            for name, value in vars(module).items()
            if name != _HOOK_NOW and type(value) not in _METHODS
        ]
    return sha256(repr(found).encode(errors="backslashreplace")).hexdigest()


def _form(value: Any, depth: int = 3) -> Any:
    """A number itself, the shape of a tensor, what is in a container or plain object, else the type."""
    kind = type(value)
    if kind in _STATED:
        return kind, value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    held = filled_by(value) if depth else None
    if held is None:
        return kind
    items = islice(items_of(held), _MANY)
    return kind, len(held), *((_form(key, 0), _form(item, depth - 1)) for key, item in items)


def _all_of(*packets: Any) -> frozenset[Any]:
    return frozenset(getattr(packet, name) for packet in packets for name in packet.overloads())


def _asked(name: str) -> frozenset[Tag]:
    return frozenset({Tag("effect", name=name)})


_FINITE, _NOT_FINITE, _ALL, _ANY = map(_asked, ("is finite", "is not finite", "of all", "of any"))
_GUARDS = {
    **dict.fromkeys((torch.isfinite, Tensor.isfinite), _FINITE),
    **dict.fromkeys((torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf), _NOT_FINITE),
    **dict.fromkeys(_all_of(_aten.isnan, _aten.isinf), _NOT_FINITE),
    **dict.fromkeys(_all_of(_aten.all, _aten._is_all_true), _ALL),
    **dict.fromkeys(_all_of(_aten.any, _aten._is_any_true), _ANY),
}
_OPPOSITE = {_FINITE: _NOT_FINITE, _NOT_FINITE: _FINITE, _ALL: _ANY, _ANY: _ALL}
_NEGATIONS = _all_of(_aten.logical_not, _aten.bitwise_not)
_COMBINED = _all_of(_aten.bitwise_and, _aten.bitwise_or, _aten.logical_and, _aten.logical_or)


def makes_guard(func: Any) -> bool:
    """Whether an operation may make what `Guesses` notes, which each run has its own of."""
    return func in _GUARDS or func in _NEGATIONS or func in _COMBINED


class Guesses:
    """The answers of one run.

    What holds of all values is taken to hold, and what is asked of any is not, as an assertion wants it. What
    asks for numbers that are not finite finds none, with opposite answers too: what a step does then may be
    to end the process. Now and then an answer is another one, so that loops end which go on for as long as
    something holds, or until it does.

    Args:
        holds: What is answered where code asks whether something else holds.
        fraction: The number where there may be a fraction.
        opposite: Whether to answer the other way: the first times, for a loop may go on while something
            holds.

    Attributes:
        asked: Whether code has asked for anything else.
    """

    def __init__(self, *, holds: bool = False, fraction: float = 1.0, opposite: bool = False) -> None:
        self._holds, self._fraction = holds, fraction
        self._opposite_left = _MOST_OPPOSITE if opposite else 0
        self._guards = TagStore()
        self._reads, self.asked = 0, False

    @property
    def are_endless(self) -> bool:
        """Whether code has read so many numbers that it may never end."""
        return self._reads >= _ENDLESS

    def note(self, func: Any, operands: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """An operation or function has run, which may make what a guard asks.

        Args:
            func: It.
            operands: Tensors it was called with.
            results: Tensors it has made.
        """
        guard = _GUARDS.get(func)
        if makes_guard(func):
            kinds = {self._guards.of(operand) for operand in operands}
            known = kinds.pop() if len(kinds) == 1 else frozenset()
            if guard is None:
                guard = _OPPOSITE.get(known) if func in _NEGATIONS else known
            elif known in (_FINITE, _NOT_FINITE):
                guard = known
        if guard:
            for tensor in results:
                self._guards.replace(tensor, guard)

    def note_function(self, func: Any, result: Any) -> None:
        """The same for a function that torch puts together of several operations."""
        if func in _GUARDS and isinstance(result, Tensor):
            self._guards.replace(result, _GUARDS[func])

    def asks_if_finite(self, tensor: Tensor) -> bool:
        """Whether a tensor says no more than whether numbers are finite."""
        return self._guards.of(tensor) in (_FINITE, _NOT_FINITE)

    def answer(self, func: Any, tensor: Tensor) -> bool | int | float:
        """The number in a tensor.

        Args:
            func: The operation that reads it, one of `SCALAR_READS`.
            tensor: A placeholder.
        """
        self._reads += 1
        otherwise = self._reads % _OTHERWISE_EACH == 0
        if func._schema.name == SCALAR_READS[0] and tensor.dtype is not torch.bool:
            if otherwise:
                return 0.0 if tensor.dtype.is_floating_point else 0
            return self._fraction if tensor.dtype.is_floating_point else 1
        guard = self._guards.of(tensor)
        if self.asks_if_finite(tensor):
            return guard == _FINITE
        self.asked = True
        if self._opposite_left:
            self._opposite_left -= 1
            otherwise = not otherwise
        return (guard == _ALL if guard else self._holds) is not otherwise


def is_tensor_read(func: Any) -> bool:
    """Whether a function gives Python what is in a tensor, past the operations."""
    return func in _READS


_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
