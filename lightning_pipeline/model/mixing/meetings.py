"""Values of units that meet what is of the batch alone: where a number of all samples decides about one.

Times and over a single number, a loss is followed by the number that the whole batch has. What bends such a
value, moves it or gives it to another unit has to have the number of the batch itself.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

_TIMES = frozenset({"mul", "multiply", "rmul", "imul"})
_OVER = frozenset({"div", "divide", "true_divide", "truediv", "itruediv"})
_LINEAR = _TIMES | _OVER | frozenset({
    "neg", "negative", "positive", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type",
    "type_as", "contiguous", "reshape", "view", "flatten", "squeeze", "unsqueeze", "cpu", "cuda", "getitem",
    "sum", "mean", "add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "dot", "vdot", "inner", "matmul",
    "mm", "mv", "rmatmul", "stack", "cat", "hstack", "concat", "expand", "expand_as", "view_as",
})  # fmt: skip
MOVING = frozenset({
    "transpose", "permute", "t", "adjoint", "movedim", "moveaxis", "swapaxes", "swapdims", "tril",
    "triu", "diagonal", "diag", "trace", "diag_embed", "roll", "flip", "fliplr", "flipud", "rot90",
    "narrow", "select", "index_select", "gather", "take", "take_along_dim", "cumsum", "repeat", "tile",
    "unflatten", "ravel", "unbind", "chunk", "split", "tensor_split", "broadcast_to", "masked_fill",
    "fill_diagonal", "index_fill", "diff", "bmm", "outer", "kron", "tensordot", "einsum", "nansum",
    "pad", "linear", "get", "masked_select", "where", "scatter", "addmm", "masked_scatter",
    "repeat_interleave",
})  # fmt: skip
"""Functions, by name, that move, pick or add up what they are given: linear in it, where they add nothing."""
_NUMBERS = _TIMES | _OVER | frozenset({
    "add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "rtruediv", "rdiv", "pow", "rpow", "clamp",
    "clip", "clamp_min", "clamp_max", "gt", "lt", "ge", "le", "where", "masked_fill", "full_like", "maximum",
    "minimum",
})  # fmt: skip
_SETS = frozenset({"unique", "bincount", "histc", "unique_consecutive"})


def name_of(func: Any) -> str:
    """Of a function, without what says that it writes or is an operator."""
    return str(getattr(func, "__name__", "a function")).strip("_")


def is_set(func: Any) -> bool:
    """Whether a function gives something of as many things as values say, which are no samples."""
    return name_of(func) in _SETS


def may_be_of_batch(func: Any, numbers: Iterable[Any]) -> bool:
    """Whether numbers that a function is given may follow from samples, or from how many there are."""
    return any(type(one) is float or name_of(func) in _NUMBERS for one in numbers)


def picks(func: Any, args: Any) -> bool:
    """Whether a function picks as many samples as values say."""
    name = name_of(func)
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(one, Tensor) and not one.is_floating_point() and is_mask(one) for one in index)
    return name in ("nonzero", "argwhere", "masked_select") or (name == "where" and len(args) == 1)


def is_mask(tensor: Tensor) -> bool:
    """Whether it says yes or no."""
    return tensor.dtype.itemsize == 1 and str(tensor.dtype) == "torch.bool"


class Met(NamedTuple):
    """One such meeting.

    Attributes:
        func: What was called.
        line: Where.
        position: How many calls of units there had been.
        result: The shape of what came out.
        values: What is of the batch alone; None where ranks may have others.
        nth: How many functions had been called, with this one.
    """

    func: Any
    line: str
    position: int
    result: tuple[int, ...] | None
    values: list[Any]
    nth: int


class Meetings:
    """Those of one run of a step.

    Attributes:
        met: In order.
        decides: Numbers of those that have to have the batch's values; of others the loss is followed.
        moved: Numbers of those of which what came out was moved or picked from: that is followed where it has
            no samples, and decides else.
        drawn: Numbers of those that random numbers have a part in.
        called: All functions that were called, and units by their numbers, in order.
    """

    def __init__(self) -> None:
        self.met: list[Met] = []
        self.called: list[Any] = []
        self.decides: set[int] = set()
        self.moved: set[int] = set()
        self.drawn: set[int] = set()
        self._scaled: dict[int, tuple[Tensor, frozenset[int]]] = {}
        self._soft: dict[int, Tensor] = {}
        """Rows times or over a number of the batch: held, so that no identity comes twice."""

    def alone(
        self, func: Any, args: Any, result: Any, values: list[tuple[Any, Any]], line: str, position: int
    ) -> None:
        """A function of the batch alone was called.

        Args:
            func: It.
            args: Its arguments.
            result: What it gave.
            values: Its arguments: each, and as it is kept.
            line: Where.
            position: How many calls of units there had been.
        """
        if not isinstance(result, Tensor) or not result.dim() or name_of(func) not in _LINEAR:
            return
        rows = [one for one in args if isinstance(one, Tensor) and one.dim()]
        if len(rows) != 1:
            return
        if id(rows[0]) in self._soft:
            self._soft[id(result)] = result
        elif name_of(func) in _TIMES or (name_of(func) in _OVER and args[0] is rows[0]):
            self._soft[id(result)] = result
            self.decides.add(len(self.met))
            kept = [kept for one, kept in values if one is rows[0]]
            self.met.append(Met(func, line, position, tuple(result.shape), kept, len(self.called)))

    def together(
        self, func: Any, args: Any, of_units: list[Tensor], result: Any, values: list[tuple[Any, Any]],
        line: str, position: int, *, drawn: bool,
    ) -> None:  # fmt: skip
        """A function was called on what units gave.

        Args:
            func: It.
            args: Its arguments.
            of_units: Those of them that units gave.
            result: What came out.
            values: The others: each, and as it is kept.
            line: Where.
            position: How many calls of units there had been.
            drawn: Whether random numbers have a part in them.
        """
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        if not any(one.dim() for one in of_units) and shape in ((), None):
            return  # a number, which is followed
        name, marks = name_of(func), self._marks(of_units)
        if name in _NUMBERS:  # elsewhere they may be sizes
            values = [(one, float(kept) if type(kept) is int else kept) for one, kept in values]
        scales = name in _TIMES or (name in _OVER and args[0] is of_units[0])
        single = [(one, kept) for one, kept in values if scales and self._is_followed(one)]
        others = [kept for one, kept in values if not any(one is other for other, _ in single)]
        before = len(self.met)
        if single:
            marks |= {len(self.met)}
            kept = [kept for _, kept in single]
            self.met.append(Met(func, line, position, shape, kept, len(self.called)))
        if others:
            self.decides.add(len(self.met))
            self.met.append(Met(func, line, position, shape, others, len(self.called)))
        if drawn:
            self.drawn |= set(range(before, len(self.met)))
        if name in MOVING:
            self.moved |= marks
        elif name not in _LINEAR:
            self.decides |= marks
            return
        for one in result if isinstance(result, list | tuple) else (result,):
            if marks and isinstance(one, Tensor) and one.dim():
                self._scaled[id(one)] = one, frozenset(marks)

    def leave(self, given: Iterable[Tensor]) -> None:
        """A unit is given these, or the step returns them."""
        self.decides |= self._marks(given)

    def _marks(self, tensors: Iterable[Tensor]) -> set[int]:
        return {mark for one in tensors for mark in self._scaled.get(id(one), (one, frozenset()))[1]}

    def _is_followed(self, value: Any) -> bool:
        return not isinstance(value, Tensor) or value.numel() == 1 or id(value) in self._soft
