"""Numbers that are no sum over samples: the root of a mean, a quotient of two sums, a largest value.

A batch's is not made of its micro-batches', but of the sums that these begin with. So what is kept of one is
how it was worked out; the batch's is worked out once more, from the batch's sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline.model.loss.events import Form, Seen, Share, Whole, grows, pairs, type_of
from lightning_pipeline.model.loss.functions import ARITHMETIC, LIKE, PLACES, SUMS, both, order_of
from lightning_pipeline.model.loss.reductions import LOSSES
from lightning_pipeline.model.tensors import is_placeholder, map_tensors


class _Known(Protocol):
    fraction: float
    differs: bool
    remembered: bool
    place: tuple[Any, ...]
    whole: Whole

    def of(self, value: Any) -> Share | None: ...
    def bent(self, value: Any) -> "Bent | None": ...
    def counts(self, value: Tensor, seen: Seen | None) -> bool: ...
    def number(self, mine: float, theirs: float, place: tuple[Any, ...]) -> float: ...


class DifferentWaysError(Exception):
    """Micro-batches have worked a number out in ways that cannot be put together."""


@dataclass(frozen=True)
class Leaf:
    """What a number begins with: this micro-batch's part of it.

    Attributes:
        part: Its value.
        together: Makes of all parts, one above the other, the batch's; None: nobody knows.
        origin: What its factors were read from, as of a share.
        is_answer: Whether a metric has given it.
    """

    part: Tensor
    together: Callable[[Tensor], Tensor] | None
    origin: int = 0
    is_answer: bool = False


@dataclass(frozen=True)
class Bent:
    """A call that makes a number of others.

    Attributes:
        func: What was called; None: this is what the one argument is.
        args: Its arguments, a `Leaf` or `Bent` for each number that is followed.
        kwargs: Likewise.
        always: Whether a share of the result would be wrong: it is made of one that is bent.
        by_unit: Whether nothing is wrong with the share but a number that a unit computed, or one of which
            the batch's is known.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    always: bool = False
    by_unit: bool = False

    @property
    def is_sum(self) -> bool:
        """Whether numbers are added, and nothing else."""
        parts = [one for one in self.args if isinstance(one, Bent)]
        return self.func in SUMS and self.by_unit and all(one.is_sum for one in parts)

    @property
    def is_of_metrics(self) -> bool:
        """Whether metrics have given any of it."""
        return any(leaf.is_answer for leaf in _leaves((self.args, self.kwargs)))

    def origins(self) -> set[int]:
        """Of all that it begins with."""
        return {leaf.origin for leaf in _leaves((self.args, self.kwargs))}


def bend(known: _Known, func: Any, args: Any, kwargs: Any, seen: Seen | None) -> Bent | None:
    """How a call makes a number of numbers of the batch; None where it makes none.

    What else is in the call is what the whole batch's has there.

    Args:
        known: What is known of its arguments.
        func: That is about to be called.
        args: Its arguments.
        kwargs: Likewise.
        seen: The call of the whole batch; None where it is not known.
    """
    if func in LOSSES and _is_weighted_otherwise(known, args, kwargs, seen):
        return Bent(_unknown, (), always=True)
    if not (_has_number(known, args) or _has_number(known, tuple(kwargs.values()))):
        return None
    notes = _Notes(known)
    theirs = ((), {}) if seen is None else (seen.args, seen.kwargs)
    made = (
        notes.of(tuple(args), theirs[0]),
        {name: notes.of(value, theirs[1].get(name)) for name, value in kwargs.items()},
    )
    if not notes.found or notes.apart:
        return None
    always = any(notes.found) or notes.by_unit
    if seen is None or notes.unclear:
        return Bent(_unknown, (), always=always)
    if notes.differs:
        known.differs = True
    if func is Tensor.__setitem__:
        return Bent(_with_item, *made, always=True)
    return Bent(func, *made, always=always, by_unit=func in _FOLLOWING and always and not notes.other)


def _is_weighted_otherwise(known: _Known, args: Any, kwargs: Any, seen: Seen | None) -> bool:
    """Whether a loss has something beside its samples that the whole batch has otherwise: a `pos_weight`."""
    named = {name: value for name, value in kwargs.items() if name not in ("input", "target")}
    beside = (*args[2:], *named.values())
    if any(isinstance(one, Tensor | float) and _is_of_batch(known, one) for one in beside):
        return True
    if seen is None:
        return False
    theirs = (*seen.args[2:], *(seen.kwargs.get(name) for name in named))
    return any(map(_differs, beside, theirs))


def _is_of_batch(known: _Known, value: Tensor | float) -> bool:
    share = known.of(value)
    return known.bent(value) is not None or (share is not None and (share.single or bool(share.lost)))


def _differs(mine: Any, theirs: Any) -> bool:
    """Whether both are known, of one form, and not the same."""
    if isinstance(mine, Tensor):
        form = theirs if isinstance(theirs, Form) and theirs.shape == tuple(mine.shape) else Form(())
        return form.value is not None and not is_placeholder(mine) and not torch.equal(mine, form.value)
    return isinstance(mine, float) and isinstance(theirs, float) and mine != theirs


def _has_number(known: _Known, values: Any) -> bool:
    """Whether any of them is a number of the batch."""
    for value in values:
        if isinstance(value, list | tuple):
            if _has_number(known, value):
                return True
        elif isinstance(value, Tensor | float):
            share = known.of(value)
            if known.bent(value) is not None or (share is not None and share.single and not share.lost):
                return True
    return False


class _Notes:
    """What the arguments of one call are.

    Attributes:
        found: For each number of the batch, whether it is bent.
        apart: Whether there are sums that are no single number.
        unclear: Whether nobody knows what an argument would be for the whole batch.
        differs: Whether an argument goes by the values of this batch, or by its size.
        by_unit: Whether an argument is a number that a unit computed.
        other: Whether one is bent for another reason.
    """

    def __init__(self, known: _Known) -> None:
        self._known = known
        self._numbers = 0
        self.found: list[bool] = []
        self.apart = self.unclear = self.differs = self.by_unit = self.other = False

    def of(self, value: Any, theirs: Any) -> Any:
        """An argument, as it is kept."""
        if isinstance(value, list | tuple):
            paired = theirs if isinstance(theirs, list | tuple) and len(theirs) == len(value) else None
            return type_of(value)(
                self.of(item, None if paired is None else paired[i]) for i, item in enumerate(value)
            )
        if isinstance(value, Tensor | float):
            share, bent = self._known.of(value), self._known.bent(value)
            if bent is not None and (given := self._given(value, theirs)) is not None:
                self.found.append(True)
                self.other |= given.numel() != 1
                return given
            if bent is not None:
                self.found.append(True)
                self.other |= not bent.by_unit
                return bent
            if share is not None and share.single and not share.lost:
                self.found.append(False)
                parts = [tensor.detach().double() * factor for factor, tensor in share.terms if factor]
                return Leaf(sum(parts, torch.zeros((), dtype=torch.float64)), summed, share.origin)
            if isinstance(value, Tensor):
                self.apart |= share is not None
                return self._tensor(value, theirs)
        if isinstance(value, slice):
            theirs = theirs if isinstance(theirs, slice) else slice(None)
            return slice(
                *(self.of(getattr(value, at), getattr(theirs, at)) for at in ("start", "stop", "step"))
            )
        if isinstance(value, int | float):
            if not isinstance(theirs, int | float):
                self.unclear = True
                return value
            self._numbers += 1
            return self._known.number(value, theirs, (*self._known.place, self._numbers))
        return value

    def _given(self, value: Tensor | float, theirs: Any) -> Tensor | None:
        """The batch's number, where no unit takes part in it: a count of targets that is 1 at least."""
        if self._known.remembered or self._known.whole.unclear or not isinstance(theirs, Form):
            return None
        if not isinstance(value, Tensor) or theirs.shape != tuple(value.shape) or theirs.guessed:
            return None
        self.differs = self.differs or theirs.value is not None
        return theirs.value

    def _tensor(self, value: Tensor, theirs: Any) -> Any:
        if isinstance(theirs, Form) and theirs.computed and theirs.shape == tuple(value.shape) == ():
            self.by_unit = True  # a mean over samples, as where it is logged alone
            return Leaf(value.detach().double() * self._known.fraction, summed)
        if self._known.remembered or not isinstance(theirs, Form) or theirs.shape != tuple(value.shape):
            self.unclear = True
            return value
        self.differs = True  # values of another batch may be others
        return value.detach().clone() if theirs.value is None else theirs.value


def extreme(known: _Known, func: Any, args: Any, kwargs: Any, result: Any, seen: Seen | None) -> Bent | None:
    """What a call makes of samples that is no sum of theirs; None where it does not.

    Args:
        known: What is known of its arguments, and of the micro-batch.
        func: That was called.
        args: Its arguments.
        kwargs: Likewise.
        result: Of the call.
        seen: The call of the whole batch; None where it is not known.
    """
    value = args[0] if args else None
    if not isinstance(value, Tensor) or not isinstance(result, Tensor) or is_placeholder(result):
        return None
    if func not in _OWN_PAIRS and _loses_pairs(value, result, seen):
        return Bent(_unknown, (), always=True)  # each sample met those of its micro-batch alone
    if value.numel() == 1 and not grows(seen, 0, value) and func in _REDUCING:
        return None
    if func not in _REDUCING:
        unclear = _mixes_samples(func, args, kwargs, value, seen)
        unclear = unclear or _is_of_all(known, func, args, result, seen)
        return Bent(_unknown, (), always=True) if unclear else None
    share = known.of(value)
    picked = share is not None and not share.single
    if not picked and (grows(seen, 0, value) is False or (seen is not None and seen.result != result.shape)):
        return None
    makes = _norm_of(order_of(func, args, kwargs)) or _REDUCING[func]
    if makes is None or not (picked or known.counts(value, seen)):
        return Bent(None, (Leaf(result.detach().clone(), None),), always=True)
    return Bent(None, (Leaf(result.detach().clone(), makes),), always=True)


def extremes(
    known: _Known, func: Any, args: Any, kwargs: Any, result: Any, seen: Seen | None
) -> Sequence[Bent | None]:
    """The same for a call that returns several tensors, such as `max(0)` or `topk`: one for each, or none."""
    value = args[0] if args else None
    if (
        not isinstance(value, Tensor)
        or is_placeholder(value)
        or not all(isinstance(r, Tensor) for r in result)
    ):
        return []
    if func not in _MIXING:
        return _each_of_all(known, func, args, result, seen)
    if not _mixes_samples(func, args, kwargs, value, seen):
        return []
    unknown = Bent(_unknown, (), always=True)
    makes = _REDUCING.get(func)
    if makes is None or not known.counts(value, seen):
        return [unknown] * len(result)
    return [Bent(None, (Leaf(result[0].detach().clone(), makes),), always=True), unknown]


def _each_of_all(known: _Known, func: Any, args: Any, result: Any, seen: Seen | None) -> list[Bent | None]:
    """Several results of a function that may make of all samples what is none of theirs."""
    if seen is None or seen.result is None or len(seen.result) != len(result):
        return []
    makes = (
        [_smallest, _largest] if func in _EXTREMES and known.counts(args[0], seen) else [None] * len(result)
    )
    return [
        Bent(None, (Leaf(one.detach().clone(), make),), always=True)
        if _is_of_all(known, func, args, one, seen._replace(result=shape))
        else None
        for one, make, shape in zip(result, makes, seen.result, strict=True)
    ]


def _is_of_all(known: _Known, func: Any, args: Any, result: Tensor, seen: Seen | None) -> bool:
    """Whether a function that nothing is known of makes of all samples what is none of theirs."""
    if seen is None or func in _ELSEWHERE:
        return False
    theirs = seen.args[0] if func is Tensor.__setitem__ else None
    if (theirs.shape if isinstance(theirs, Form) else seen.result) != result.shape:
        return False
    return any(
        isinstance(arg, Tensor)
        and bool(grows(seen, position, arg))
        and ((share := known.of(arg)) is None or not share.single)
        for position, arg in enumerate(args)
    )


def _mixes_samples(func: Any, args: Any, kwargs: Any, value: Tensor, seen: Seen | None) -> bool:
    """Whether what each sample has afterwards goes by others, as after `softmax(0)`."""
    if not grows(seen, 0, value):
        return False
    if func in _OVER_ALL:
        trains = kwargs.get("training", args[5] if len(args) > 5 else False)
        return func is not F.batch_norm or bool(trains)
    if func in _OVER_LAST:
        given: Any = range(-len(kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())), 0)
    elif func in _MIXING:
        position, default = _MIXING[func]
        given = kwargs.get("dim", kwargs.get("dims", args[position] if len(args) > position else default))
    else:
        return False
    dimensions = given if isinstance(given, list | tuple | range) else [given]
    theirs = seen.args[0].shape if seen is not None else ()
    if len(theirs) != value.dim():
        return False
    grown = [d for d, (mine, whole) in enumerate(zip(value.shape, theirs, strict=True)) if mine != whole]
    return any(d is None or d % value.dim() in grown for d in dimensions)


def _loses_pairs(value: Tensor, result: Tensor, seen: Seen | None) -> bool:
    if seen is None or seen.result is None or not _has_pairs(value, seen):
        return False
    return not pairs(tuple(result.shape), seen.result)


def _has_pairs(value: Tensor, seen: Seen) -> bool:
    theirs = seen.args[0]
    return isinstance(theirs, Form) and not theirs.guessed and pairs(tuple(value.shape), theirs.shape)


def together(found: Sequence[Bent]) -> Tensor:
    """The batch's number.

    Args:
        found: How each micro-batch has worked it out.

    Raises:
        DifferentWaysError: Not in one way, or with other numbers beside.
    """
    try:
        return together_in_form(found).reshape(())
    except RuntimeError as error:
        raise DifferentWaysError from error


def together_in_form(found: Sequence[Bent]) -> Tensor:
    """The batch's tensor, where it need not be one number. See `together`."""
    try:
        result = _Together().of(list(found))
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise DifferentWaysError from error
    if not isinstance(result, Tensor):
        result = torch.as_tensor(result, dtype=torch.float64)
    return result.detach().double()


class _Together:
    """Works out once what is used several times."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, ...], Any] = {}

    def of(self, values: list[Any]) -> Any:
        """One value of one per micro-batch."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise DifferentWaysError
        if isinstance(first, Bent):
            key = tuple(map(id, values))
            if key not in self._done:
                self._done[key] = self._called(values)
            return self._done[key]
        if isinstance(first, Leaf):
            return _leaf(values)
        if isinstance(first, list | tuple):
            if len({len(value) for value in values}) != 1:
                raise DifferentWaysError
            return type_of(first)(self.of(list(column)) for column in zip(*values, strict=True))
        if isinstance(first, Tensor):
            others = [value for value in values if value is not first]
            if not all(value.shape == first.shape and torch.equal(value, first) for value in others):
                raise DifferentWaysError
            return first.double() if first.is_floating_point() else first
        if any(value is not first and value != first for value in values):
            raise DifferentWaysError
        return first

    def _called(self, values: list[Bent]) -> Any:
        first = values[0]
        if any(
            value.func is not first.func or value.kwargs.keys() != first.kwargs.keys() for value in values
        ):
            raise DifferentWaysError
        args = self.of([value.args for value in values])
        kwargs = {name: self.of([value.kwargs[name] for value in values]) for name in first.kwargs}
        if first.func is None:
            return args[0]
        args, kwargs = map_tensors(torch.clone, (args, kwargs))  # a function may write in place
        return first.func(*args, **kwargs)


def _leaf(values: list[Leaf]) -> Tensor:
    parts = [value.part for value in values]
    shape = torch.broadcast_shapes(*(part.shape for part in parts))
    stacked = torch.stack([part.to(torch.float64).expand(shape) for part in parts])
    if values[0].together is None:  # alike by chance, they say nothing: deviations go by how many there are
        raise DifferentWaysError
    return values[0].together(stacked)


def _leaves(value: Any) -> list[Leaf]:
    if isinstance(value, Leaf):
        return [value]
    if isinstance(value, Bent):
        return _leaves((value.args, value.kwargs))
    if isinstance(value, dict):
        return _leaves(tuple(value.values()))
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list | tuple) else []


def _unknown() -> None:
    """What nobody can put together."""
    raise DifferentWaysError


NOBODY_KNOWS = Bent(_unknown, (), always=True)
"""Of what is made otherwise than in the whole batch's step."""


def _with_item(value: Tensor, index: Any, item: Any) -> Tensor:
    """`value[index] = item`, in a copy."""
    copy = value.clone()
    copy[index] = item.to(copy.dtype) if isinstance(item, Tensor) else item
    return copy


def summed(parts: Tensor) -> Tensor:
    """The batch's number, of parts that add up."""
    return parts.sum(0)


def _largest(parts: Tensor) -> Tensor:
    return parts.amax(0)


def _smallest(parts: Tensor) -> Tensor:
    return parts.amin(0)


def _any(parts: Tensor) -> Tensor:
    return (parts != 0).any(0)


def _norm_of(order: float | None) -> Callable[[Tensor], Tensor] | None:
    """What makes the norm of all of those of parts."""
    if order is None or order < 0:
        return None
    return lambda parts: torch.linalg.vector_norm(parts, order or 1.0, dim=0)


def _all(parts: Tensor) -> Tensor:
    return (parts != 0).all(0)


_FOLLOWING = ARITHMETIC.union(both("where"))
"""Of what the batch's number is known their shares are right."""
_REDUCING: dict[Any, Callable[[Tensor], Tensor] | None] = {
    **dict.fromkeys(both("max amax"), _largest),
    **dict.fromkeys(both("min amin"), _smallest),
    **dict.fromkeys(both("any"), _any),
    **dict.fromkeys(both("all"), _all),
    **dict.fromkeys(both("std var median norm nanmedian prod logsumexp quantile nanquantile"), None),
    **dict.fromkeys(both("corrcoef cov bincount histc"), None),
    **dict.fromkeys((torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm), None),
}
"""Of samples a number, and what makes the batch's of those of the micro-batches; None: nothing does."""
_MIXING: dict[Any, tuple[int, int | None]] = {
    # where the dimension stands among the arguments, and which it is where it is not given
    **dict.fromkeys(both("softmax log_softmax cumsum cumprod logcumsumexp cummax cummin flip"), (1, None)),
    **dict.fromkeys((F.softmax, F.log_softmax, F.softmin), (1, None)),
    **dict.fromkeys(both("max min median nanmedian var_mean std_mean"), (1, None)),
    **dict.fromkeys(both("argsort sort mode"), (1, -1)),
    **dict.fromkeys(both("roll diff topk kthvalue"), (2, -1)),
    F.normalize: (2, 1),
}
_EXTREMES = frozenset(both("aminmax"))
_OWN_PAIRS = frozenset(both("diag diagonal trace __getitem__ gather take_along_dim masked_select"))
"""What takes of pairs of samples those of a sample with itself, or may."""
_OVER_LAST = frozenset((F.layer_norm, F.rms_norm))
_OVER_ALL = frozenset((torch.pdist, F.pdist, F.batch_norm))
"""What each sample has afterwards goes by others, whatever the arguments."""
_SUMMING = frozenset((*both("sum nansum mean count_nonzero"), *LOSSES))
_ELSEWHERE = _SUMMING.union(
    PLACES,
    LIKE,
    both(
        "dot vdot inner matmul mm mv __matmul__ einsum where new_zeros new_ones new_full new_empty new_tensor"
    ),
)
"""What is followed by a rule of its own, or takes nothing of the values."""
