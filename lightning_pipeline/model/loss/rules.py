"""The share of what a function makes, by the shares of what it was given: one rule a function."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeline.model.loss.events import (
    SHAPES,
    TARGETS,
    VALUES,
    Event,
    Operand,
    OwnDivisor,
    Seen,
    Share,
    Whole,
    pairs,
    same_beside,
)
from lightning_pipeline.model.loss.functions import AT_LEAST, LINEAR_OF_ONE, SELECTING, SUMS, both
from lightning_pipeline.model.loss.reductions import (
    LOSSES,
    LossCall,
    read_together,
    reduction_of,
    valid_targets,
)
from lightning_pipeline.model.tensors import is_placeholder, user_line


class Follows(Protocol):
    """Who follows the functions of a micro-batch."""

    fraction: float
    differs: bool
    root: nn.Module

    def of(self, value: Any) -> Share | None: ...
    def bent(self, value: Any) -> Any: ...
    def lost(self, *shares: Share | None) -> Share | None: ...
    def counted(self, mine: float, whole: float) -> None: ...
    def multiplied(self, result: Tensor, number: Tensor) -> None: ...
    def mean_of(self, result: Tensor, count: float | Tensor) -> None: ...


class Step(NamedTuple):
    """One function on the way from the shares of its arguments to that of its result."""

    shares: Follows
    mine: Event
    whole: Event
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor
    known: list[Share | None]
    seen: Whole

    @property
    def grows(self) -> bool:
        """Whether the result has samples of its own: the whole batch's is larger."""
        return self.mine.result != self.whole.result or self.is_of_picked

    @property
    def is_of_picked(self) -> bool:
        """Whether the result has a row for each of the samples that a mask picked."""
        pairs = zip(self.known, self.mine.operands, strict=False)
        return any(
            share is not None and share.picked and self.mine.result[:1] == operand.shape[:1] != ()
            for share, operand in pairs
        )

    def each_picked(self) -> Share | None:
        """The result, if it has a row for each of these, made of what each of them has as it stands."""
        pairs = zip(self.known, self.args, strict=False)
        if self.is_of_picked and all(share is None or is_of_rows(share, value) for share, value in pairs):
            return Share(((1.0, self.result),), VALUES, picked=True)
        return None

    @property
    def has_guessed_number(self) -> bool:
        """Whether a number goes by what was made up for what units compute."""
        return any(operand.guessed and not operand.shape for operand in self.whole.operands)

    def has_samples(self, position: int) -> bool:
        """Whether an argument has."""
        share = self.known[position] if position < len(self.known) else None
        if share is not None and share.picked:
            return True
        whole = self.whole.operands[position]
        return self.mine.operands[position].shape != whole.shape or (whole.guessed and whole.shape != ())

    def has_pairs(self, position: int) -> bool:
        """Whether an argument has something for each pair of samples; a micro-batch has those of its own."""
        return pairs(self.mine.operands[position].shape, self.whole.operands[position].shape)

    def is_unclear(self, position: int) -> bool:
        """Whether an argument may have samples, just as many as the whole batch: a mask picked them."""
        mine, whole = self.mine.operands[position], self.whole.operands[position]
        return (
            self.seen.ragged
            and mine.shape == whole.shape != ()
            and whole.computed
            and not self.known[position]
        )

    def share(self, position: int) -> Share:
        """The share of an argument that was followed, or has samples, or is the same in all micro-batches."""
        known = self.known[position]
        if known is not None:
            return known
        value, whole = self.args[position], self.whole.operands[position].value
        factor = 1.0 if self.grows or self.has_samples(position) else self.shares.fraction
        if not isinstance(value, Tensor):
            number = float(value if whole is None else whole)
            return Share(((factor, torch.full_like(self.result.detach(), number)),) if number else ())
        return Share(((factor, value),))

    def constant(self, position: int) -> tuple[float, float] | None:
        """An argument that is one number which no unit computes: here, and in the whole batch."""
        known = self.known[position] if position < len(self.known) else None
        if known is not None and known.made_up:
            return None
        mine, whole = self.mine.operands[position].value, self.whole.operands[position].value
        if mine is None or whole is None:
            return None
        self.shares.differs |= isinstance(mine, Tensor)  # in another batch it may be another
        return float(mine), float(whole)

    def origin_of(self, position: int) -> int:
        """What a number was read from: a literal or an attribute is the same for each micro-batch."""
        if not isinstance(self.args[position], Tensor) and not self.seen.reads:
            return SHAPES
        return VALUES

    def mean_of(self, count: float | Tensor) -> Share | None:
        """The result as a mean of as many values as nobody knows of the whole batch."""
        self.shares.mean_of(self.result, count)
        lost, number = self.lost(always=True), float(count)
        return None if lost is None else lost._replace(own=OwnDivisor(number, number, is_count=True))

    def mapped(
        self, share: Share, position: int, change: Callable[[Tensor], Tensor], factor: float = 1.0
    ) -> Share | None:
        """The result as a linear function of one argument, whose share this is."""
        if share.lost and share.own is not None and factor == 1:
            return share
        if share.lost:
            return self.shares.lost(share)
        return mapped(share, self.args[position], self.result, change, factor)

    def lost(self, *, always: bool = False) -> Share | None:
        """The result, where it cannot be followed."""
        if always:
            return Share((), VALUES, user_line(self.shares.root))
        return self.shares.lost(*self.known)


def mapped(
    share: Share, value: Any, result: Tensor, change: Callable[[Tensor], Tensor], factor: float = 1.0
) -> Share:
    if share.lost:
        return share
    if is_own(share, value):
        return share._replace(terms=((share.terms[0][0] * factor, result),))
    return share._replace(terms=tuple((f * factor, change(tensor)) for f, tensor in share.terms))


def is_own(share: Share, value: Any) -> bool:
    """Whether it is a factor times the very value, so that what is made of one is made of the other."""
    return len(share.terms) == 1 and share.terms[0][1] is value


def is_of_rows(share: Share, value: Any) -> bool:
    """Whether it is samples that a mask picked, as they are."""
    return share.picked and not share.lost and is_own(share, value) and share.terms[0][0] == 1


def renamed(share: Share | None, old: Tensor, new: Tensor) -> Share | None:
    """The share of a value that is about to be overwritten, with a copy in its place."""
    if share is None:
        return None
    return share._replace(terms=tuple((f, new if tensor is old else tensor) for f, tensor in share.terms))


def _sum_of_two(first: float, second: float) -> "Rule":
    def rule(step: Step) -> Share | None:
        if not any(step.known):
            return None
        whole_meets_sample = step.grows and any(
            share is not None and not step.has_samples(i) for i, share in enumerate(step.known)
        )
        alpha = step.kwargs.get("alpha", 1)
        if (
            whole_meets_sample
            or not isinstance(alpha, int | float)
            or any(share and share.lost for share in step.known)
        ):
            return step.lost()
        one, other = step.share(0), step.share(1)
        origin = max(one.origin, other.origin)
        factors = {factor for factor, _ in (*one.terms, *other.terms)}
        own = all(not s.terms or is_own(s, step.args[i]) for i, s in enumerate((one, other)))
        if len(factors) == 1 and own:
            return Share(((factors.pop(), step.result),), origin)
        shape = step.result.shape
        ones, others = (first * alpha, second) if first < 0 else (first, second * alpha)
        terms = [(f * ones, t) for f, t in one.terms] + [(f * others, t) for f, t in other.terms]
        return Share(tuple((f, t if t.shape == shape else t.expand(shape)) for f, t in terms), origin)

    return rule


def _product(step: Step) -> Share | None:
    for position in (1, 0):
        found = step.constant(position)
        if found is not None:
            number = step.args[position]
            return _times(step, 1 - position, *found, lambda t, number=number: t * number)  # type: ignore[misc]
    if not any(step.known):
        return None
    if all(step.known):
        one, other = step.known
        assert one is not None, "both are known"
        assert other is not None, "both are known"
        if (
            step.has_samples(0)
            and step.has_samples(1)
            and is_own(one, step.args[0])
            and is_own(other, step.args[1])
        ):
            factor = one.terms[0][0] * other.terms[0][0]
            return Share(((factor, step.result),), max(one.origin, other.origin))
        return step.lost()
    position = 0 if step.known[0] is not None else 1
    return _by_other(step, position, lambda t: t * step.args[1 - position])


def _quotient(step: Step) -> Share | None:
    found = step.constant(1)
    if found is not None and not step.kwargs:
        here, there = found
        return _times(step, 0, 1 / here if here else math.inf, 1 / there if there else math.inf,
                      lambda t: t / step.args[1])  # fmt: skip
    one, other = step.known
    if one is not None and other is not None and not step.kwargs and step.grows:
        both_rows = is_of_rows(one, step.args[0]) and is_of_rows(other, step.args[1])
        return Share(((1.0, step.result),), VALUES) if both_rows else step.lost()
    if step.known[1] is not None and step.mine.operands[1].elements == 1:
        lost = step.lost(always=True)
        return None if lost is None else lost._replace(own=_own_divisor(step))
    if step.known[1] is not None or step.kwargs:
        return step.lost()
    return None if step.known[0] is None else _by_other(step, 0, lambda t: t / step.args[1])


def _own_divisor(step: Step) -> OwnDivisor | None:
    """Of a sum over samples, or a mean of them, over another one in which units have a part."""
    (one, other), divisor = step.known[:2], step.args[1]
    if one is None or other is None or step.grows or not is_own(one, step.args[0]) or one.lost:
        return None
    here = float(divisor)
    if not math.isfinite(here) or (isinstance(divisor, Tensor) and divisor.requires_grad):
        return None
    weight = one.terms[0][0] * here
    if other.floor is not None:
        return OwnDivisor(weight, *other.floor)
    if other.lost:
        return None
    return OwnDivisor(weight, sum(f * float(tensor) for f, tensor in other.terms))


def at_least(func: Any, args: Any, kwargs: Any, share: Share) -> tuple[float, float] | None:
    """The part of a sum before `clamp(min=...)`, and the bound; None of anything else."""
    bound = kwargs.get("min", args[1] if len(args) > 1 else None)
    if func not in AT_LEAST or len(args) > 2 or "max" in kwargs or not isinstance(bound, int | float):
        return None
    if share.lost or any(tensor.numel() != 1 for _, tensor in share.terms):
        return None
    return sum(f * float(tensor) for f, tensor in share.terms), float(bound)


def mean_of_picked(
    shares: Follows, func: Any, args: tuple[Any, ...], result: Any, share: Share | None
) -> Share | None:
    """A mean of values that a mask picked, where nobody knows what the whole batch's step does; else None."""
    if func not in MEANS or len(args) > 1 or share is None or not is_of_rows(share, args[0]):
        return None
    if not isinstance(result, Tensor) or result.dim():
        return None
    number = float(args[0].numel())
    shares.mean_of(result, number)
    return Share((), VALUES, user_line(shares.root), own=OwnDivisor(number, number, is_count=True))


def are_sums(one: Any, other: Any) -> bool:
    """Whether both add two values: `total + loss`, and for the first of several losses `0 + loss`."""
    return one in SUMS and other in SUMS


def sum_of_numbers(
    func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, known: Sequence[Share | None]
) -> Share | None:
    """Of two numbers that were followed, or one and 0, whatever the whole batch's step does; else None.

    A loss for each of several tasks is added where a micro-batch has samples of that task.
    """
    if func not in SUMS or kwargs or len(args) != 2 or not isinstance(result, Tensor) or result.dim():
        return None
    terms: list[tuple[float, Tensor]] = []
    for share, value in zip(known, args, strict=True):
        is_there = not isinstance(value, Tensor) or not (value.requires_grad or is_placeholder(value))
        is_nothing = share is None and is_there and shape_of(value) == () and bool(value == 0)
        if not is_nothing and (share is None or share.lost or not share.single):
            return None
        terms += [] if share is None else share.terms
    origin = max((share.origin for share in known if share is not None), default=SHAPES)
    return Share(tuple(terms), origin, single=True)


def _by_other(step: Step, position: int, change: Callable[[Tensor], Tensor]) -> Share | None:
    """A followed value times or over one that was not: fine, unless it meets single samples."""
    share = step.known[position]
    assert share is not None, "the followed one"
    if step.grows and not step.has_samples(position):
        return step.lost()
    other = step.args[1 - position]
    if step.whole.operands[1 - position].computed and isinstance(other, Tensor) and other.numel() == 1:
        if not step.grows and any(factor == 1 for factor, _ in share.terms):  # a sum over a count, maybe
            return step.lost(always=True)
        step.shares.multiplied(step.result, other)
    return step.mapped(share, position, change)


def _times(
    step: Step, position: int, here: float, there: float, change: Callable[[Tensor], Tensor]
) -> Share | None:
    """An argument times a number, which the whole batch has otherwise."""
    origin = step.origin_of(1 - position)
    share = step.known[position]
    if here == there and (share is not None or step.known[1 - position] is None):
        return (
            None
            if share is None
            else step.mapped(share._replace(origin=max(origin, share.origin)), position, change)
        )
    if share is None and step.shares.bent(step.args[position]) is not None:
        return None
    share = step.share(position)  # a number of the batch may by chance be this micro-batch's own
    if share.lost:
        return step.lost()
    if here and math.isfinite(here) and is_own(share, step.args[position]):
        factor = share.terms[0][0] * (there / here)
        is_mean = not step.grows and math.isclose(factor, step.shares.fraction, rel_tol=1e-12)
        return Share(((factor, step.result),), max(origin, share.origin) if is_mean else VALUES)
    shape = step.result.shape
    terms = [(factor * there, t if t.shape == shape else t.expand(shape)) for factor, t in share.terms]
    return Share(tuple(terms), VALUES)


def _reduction(mean: bool) -> "Rule":
    def rule(step: Step) -> Share | None:
        if not step.has_samples(0) and step.known[0] is None:
            return step.lost(always=True) if step.is_unclear(0) else None
        mine, whole = (
            event.operands[0].elements / max(1, math.prod(event.result)) for event in (step.mine, step.whole)
        )
        factor = mine / whole if mean and whole else 1.0
        if mean and step.mine.result == () and not step.whole.operands[0].guessed:
            step.shares.counted(mine, whole)
        if mean and step.whole.operands[0].guessed:
            if step.mine.result == () and (step.known[0] is None or is_of_rows(step.known[0], step.args[0])):
                return step.mean_of(step.mine.operands[0].elements)
            return step.lost(always=True)
        if step.known[0] is None and step.has_pairs(0):
            return None
        if step.grows and step.known[0] is None and factor == 1:
            return None
        return step.mapped(
            step.share(0), 0, lambda t: step.mine.func(t, *step.args[1:], **step.kwargs), factor
        )

    return rule


def _mean_of_numbers(step: Step) -> Share | None:
    """Of all that is no nan."""
    known, value = step.known[0], step.args[0]
    if not step.has_samples(0) and known is None:
        return step.lost(always=True) if step.is_unclear(0) else None
    if step.mine.result != () or (known is not None and not is_of_rows(known, value)):
        return step.lost(always=True)
    return step.mean_of((~value.detach().isnan()).sum())


def _loss(step: Step) -> Share | None:
    call = reduction_of(step.mine.func, step.args, step.kwargs)
    if step.grows or call.reduction == "none":
        return step.each_picked() or step.lost()
    if any(share is not None and not all(f == 1 for f, _ in share.terms) for share in step.known):
        return step.lost()
    if not any(map(step.has_samples, range(len(step.known)))):
        return step.lost(always=True) if any(map(step.is_unclear, range(len(step.known)))) else None
    if call.reduction == "sum":
        return Share(((1.0, step.result),))
    if any(operand.guessed for operand in step.whole.operands):
        if call.weight is None:
            count = valid_targets(step.mine.func, step.args, step.kwargs)
            return step.mean_of(_elements(step.mine, call) if count is None else count)
        return step.lost(always=True)
    if step.mine.divisor is not None and step.whole.divisor is not None:
        mine, whole = read_together(step.mine.divisor, step.whole.divisor)
        step.shares.counted(mine, whole)
        return Share(((mine / whole if whole else math.nan, step.result),), TARGETS)
    if call.weight is not None:
        return step.lost(always=True)
    if any(map(step.has_pairs, range(len(step.mine.operands)))):
        return None
    mine, whole = (float(_elements(event, call)) for event in (step.mine, step.whole))
    origin = max((share.origin for share in step.known if share is not None), default=SHAPES)
    step.shares.counted(mine, whole)
    return Share(((mine / whole, step.result),), origin)


def _elements(event: Event, call: LossCall) -> int:
    """How many numbers the mean of a loss is of: one for each text where it aligns texts."""
    if event.func is nn.functional.ctc_loss:
        shape = event.operands[0].shape
        return shape[1] if len(shape) == 3 else 1
    return max(o.shape[0] if call.reduction == "batchmean" else o.elements for o in event.operands)


def _contraction(step: Step) -> Share | None:
    """A product that sums over samples, linear in each of its arguments."""
    known = [(position, share) for position, share in enumerate(step.known) if share is not None]
    if _keeps_rows(step) and (picked := step.each_picked()):
        return picked
    if step.grows or not any(map(step.has_samples, range(len(step.mine.operands)))):
        return step.lost()
    if not known:
        return Share(((1.0, step.result),))
    if len(known) > 1 or isinstance(step.args[0], str):
        return step.lost()
    position, share = known[0]

    def change(tensor: Tensor) -> Tensor:
        args = [tensor if index == position else arg for index, arg in enumerate(step.args)]
        result: Tensor = step.mine.func(*args, **step.kwargs)
        return result

    return step.mapped(share, position, change)


def _keeps_rows(step: Step) -> bool:
    """Whether a product has a row for each row of its first argument."""
    if not isinstance(step.args[0], str):
        return step.known[0] is not None and step.mine.operands[0].shape[:1] == step.mine.result[:1]
    given, _, made = step.args[0].replace(" ", "").partition("->")
    rows = {one[:1] for one in given.split(",")}
    return rows == {made[:1]} and rows != {""} and "." not in given


def _choice(step: Step) -> Share | None:
    """`torch.where` with one condition."""
    condition = step.whole.operands[0].value
    if condition is None or len(step.args) != 3 or step.has_samples(0):
        return step.lost()
    chosen = step.args[1 if condition else 2]
    share = step.shares.of(chosen)
    if share is None and isinstance(chosen, Tensor) and chosen.requires_grad:
        return None
    return share or Share(())


MEANS = frozenset(both("mean"))
Rule = Callable[[Step], Share | None]


RULES: dict[Any, Rule] = {
    **dict.fromkeys(both("add add_ __add__ __radd__ __iadd__"), _sum_of_two(1, 1)),
    **dict.fromkeys(both("sub sub_ subtract __sub__ __isub__"), _sum_of_two(1, -1)),
    **dict.fromkeys(both("rsub __rsub__"), _sum_of_two(-1, 1)),
    **dict.fromkeys(both("mul mul_ multiply __mul__ __rmul__ __imul__"), _product),
    **dict.fromkeys(both("div div_ divide true_divide __truediv__ __itruediv__"), _quotient),
    **dict.fromkeys(both("sum nansum count_nonzero"), _reduction(mean=False)),
    **dict.fromkeys(both("mean"), _reduction(mean=True)),
    **dict.fromkeys(both("nanmean"), _mean_of_numbers),
    **dict.fromkeys(both("dot vdot inner matmul mm mv __matmul__ einsum"), _contraction),
    **dict.fromkeys(both("where"), _choice),
    **dict.fromkeys(LOSSES, _loss),
}
RULED = frozenset(RULES)
FOLLOWED = RULED | SELECTING


def linear_in(known: Follows, func: Any, args: Any, kwargs: Any, seen: Seen | None) -> int | None:
    """The argument of which a call makes a sum of sums: without samples, and all else as for the whole batch.

    Args:
        known: What is known of its arguments.
        func: That is called.
        args: Its arguments.
        kwargs: Likewise.
        seen: The call of the whole batch; None where it is not known.

    Returns:
        Its position; None where there is none.
    """
    if func not in LINEAR_OF_ONE:
        return None
    found = [(at, share) for at, arg in enumerate(args) if (share := known.of(arg)) is not None]
    if len(found) != 1 or not isinstance(args[found[0][0]], Tensor):
        return None
    position, share = found[0]
    if share.lost or not share.single or not same_beside(seen, args, kwargs, position):
        return None
    nothing = [torch.zeros_like(arg) if at == position else arg for at, arg in enumerate(args)]
    made = func(*nothing, **kwargs)
    is_moved = any(bool(one.any()) for one in (made if isinstance(made, tuple | list) else (made,)))
    return None if is_moved else position


def made_with(func: Any, args: Any, kwargs: Any, position: int, nth: int | None, tensor: Tensor) -> Tensor:
    """What a function makes of another tensor in the place of one argument; of several results that one."""
    made = func(*(tensor.clone() if at == position else arg for at, arg in enumerate(args)), **kwargs)
    found: Tensor = made if nth is None else made[nth]
    return found


def operand_of(value: Any, *, copied: bool = False) -> Operand:
    """What is kept of an argument; a copy of a number that may change."""
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if is_placeholder(value):
            return Operand(shape, computed=True)
        if value.numel() != 1 or value.requires_grad or value.is_complex():
            return Operand(shape)
        return Operand(shape, value.detach().clone() if copied else value.detach())
    number = isinstance(value, int | float)
    return Operand((), value if number else None)


def shape_of(result: Any) -> tuple[int, ...]:
    """Of a result; that of a number where it is no tensor."""
    return tuple(result.shape) if isinstance(result, Tensor) else ()
