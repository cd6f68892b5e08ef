"""Numbers that note what code decides by them.

While a step is run to see what it does, numbers of a class of ours stand where those are that change between
batches, such as `trainer.global_step`. They compute as plain ones do, and each comparison is noted as an
expression of where its numbers stand. A later batch in which all that was ever compared comes out as in one
before goes the same way, and need not be looked at.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_pipeline.model.places.owners import MISSING, Numbers, Place
from lightning_pipeline.patching import patched

Expression = tuple[Any, ...]
"""`("at", label)` for the number of a place; else a function's name and its operands, these or numbers."""
AT = "at"
INDEX = "the index of the batch"
_NUMBERS = (int, float, bool)
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
