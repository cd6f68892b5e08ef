"""What a number that a micro-batch's step works out is worth in the step of the whole batch.

A loss is a sum over samples, divided by something: samples, tokens that are not masked, weights of classes.
One device divides by what it finds in the whole batch, a micro-batch by what it finds in itself. Every
function between the units that takes part in such a number is seen once with the whole batch (`Observer`),
where it has the whole batch's divisor; so a term counts as its value times (divisor here / divisor there).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.model.loss.bent import Bent, bend, extreme, extremes
from lightning_pipeline.model.loss.calls import Form, Seen, pairs
from lightning_pipeline.model.loss.events import SHAPES, TARGETS, VALUES, Event, Operand, Share, Whole
from lightning_pipeline.model.loss.functions import IN_PLACE, JOINING, LINEAR, NUMBERS, SELECTING, both
from lightning_pipeline.model.loss.masks import has_mask
from lightning_pipeline.model.loss.reductions import LOSSES, reduction_of, valid_targets
from lightning_pipeline.model.tensors import is_placeholder, user_line


class Shares:
    """Follows the functions of one micro-batch.

    Args:
        whole: What the whole batch's step showed.
        root: The LightningModule, for messages.
        fraction: Samples of this micro-batch over those of the batch.

    Attributes:
        strayed: The line from where on the micro-batch went another way than the batch.
        taken: The functions that were called.
        differs: Whether a number between units is another one in the whole batch, or may be in another one.
    """

    def __init__(self, whole: Whole, root: nn.Module, fraction: float) -> None:
        self.fraction, self.strayed = fraction, ""
        self.whole, self.root = whole, root
        self.taken: list[Any] = []
        self.differs, self.remembered = False, whole.remembered
        self._events: Iterator[Event] = iter(whole.events.get(None, ()))
        self._computed: list[tuple[Any, str, Tensor]] = []
        self._calls: Iterator[Seen] | None = whole.calls.after(None)
        self._known: dict[int, tuple[Any, Share]] = {}  # with what it is of, so that no identity comes twice
        self._bent: dict[int, tuple[Any, Bent]] = {}

    def unit(self, number: int, nth: int) -> None:
        """A unit was called."""
        self._events, self.strayed = iter(self.whole.events.get((number, nth), ())), ""
        self._calls = self.whole.calls.after((number, nth))

    def of(self, value: Any) -> Share | None:
        """The share of a tensor, or of the float that `item()` made of one; None where nothing is known."""
        found = self._known.get(id(value))
        return None if found is None else found[1]

    def bent(self, value: Any) -> Bent | None:
        """How a number is made of others, where that is no sum over samples."""
        found = self._bent.get(id(value))
        return None if found is None else found[1]

    def know(self, value: Any, bent: Bent) -> None:
        """A value comes from elsewhere."""
        self._bent[id(value)] = value, bent

    def forget(self) -> None:
        """Let go of every value: its memory is the backward's to free."""
        self._known.clear()
        self._bent.clear()
        self._computed.clear()

    def multiplied(self, result: Tensor, number: Tensor) -> None:
        """A mean was multiplied with a number that a unit computed."""
        if result.grad_fn is not None:
            self._computed.append((result.grad_fn, user_line(self.root), number.detach()))

    def computed_in(self, loss: Tensor) -> list[tuple[str, Tensor]]:
        """Such numbers that a loss is made of, and the lines; those of what is only logged do not count."""
        pending, seen = [loss.grad_fn] if self._computed else [], set[Any]()
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen.add(node)
                pending.extend(before for before, _ in node.next_functions)
        return [(line, number) for node, line, number in self._computed if node in seen]

    def is_mean(self, share: Share) -> bool:
        """Whether it is nothing but the value by the number of samples."""
        if share.lost:
            return share.origin == SHAPES
        if share.apart or len(share.terms) != 1:
            return False
        return math.isclose(share.terms[0][0], self.fraction, rel_tol=1e-12)

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Run a function, and find the share of what it returns."""
        if func in FOLLOWED:
            self.taken.append((func, kwargs.get("reduction")))
        seen = self._seen(func)
        if func in SELECTING or (func is Tensor.__getitem__ and has_mask(args[1])):
            share = self.of(args[0])
            if self.bent(args[0]) is None and (share is None or not share.single):
                return self._select(func, args, kwargs, run)
        bent = bend(self, func, args, kwargs, seen)  # before it is run: it may write in place
        result = self._followed(func, args, kwargs, run)
        if isinstance(result, tuple):
            found = extremes(self, func, args, kwargs, result, seen)
            for one, made in zip(result, found, strict=False):
                self._keep_bent(one, made)
            return result
        made = args[0] if func is Tensor.__setitem__ else result
        self._keep_bent(made, bent or extreme(self, func, args, kwargs, result, seen))
        return result

    def _seen(self, func: Any) -> Seen | None:
        """The call in the whole batch's step; None from where on this one went another way."""
        seen = None if self._calls is None else next(self._calls, None)
        if seen is None or seen.func != func:  # what reads an attribute is made anew each time
            self._calls = None
            return None
        return seen

    def counts(self, value: Tensor, seen: Seen | None) -> bool:
        """Whether a tensor has the micro-batch's part of the elements that the whole batch's has."""
        theirs = None if seen is None else seen.args[0]
        if not isinstance(theirs, Form):
            return False
        return math.isclose(value.numel(), self.fraction * math.prod(theirs.shape), rel_tol=1e-9)

    def _followed(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        if func not in _RULES:
            return self._other(func, args, kwargs, run) if self._known else run(func, args, kwargs)
        event = self._take(func)
        known = [self.of(arg) for arg in args[:2]]
        if event is None:
            result = run(func, args, kwargs)
            self._keep(result, self.lost(*known))
            return result
        operands = tuple(operand_of(arg) for arg in args[:2])
        event = self._compared(event, operands, args)
        count = valid_targets(func, args, kwargs) if func in LOSSES and event.divisor is not None else None
        before = args[0]
        if func in IN_PLACE and isinstance(before, Tensor) and before.numel() == 1:
            before = before.clone()
            known[0] = _renamed(known[0], args[0], before)
        result = run(func, args, kwargs)
        if isinstance(result, Tensor):
            mine = Event(func, operands, shape_of(result), count)
            step = _Step(self, mine, event, (before, *args[1:]), kwargs, result, known, self.whole)
            share = _RULES[func](step)
            self._keep(result, share if share is None else share._replace(single=not step.grows))
        return result

    def _compared(self, event: Event, operands: tuple[Operand, ...], args: Any) -> Event:
        """What the whole batch's step was given; of one before, with the numbers that are given now."""
        plain = [not isinstance(arg, Tensor) for arg in args[:2]]
        if not self.whole.remembered:
            both = zip(plain, operands, event.operands, strict=False)
            self.differs |= any(is_plain and mine.value != theirs.value for is_plain, mine, theirs in both)
            return event
        both = zip(plain, operands, event.operands, strict=False)
        return event._replace(operands=tuple(mine if is_plain else theirs for is_plain, mine, theirs in both))

    def _take(self, func: Any) -> Event | None:
        if not self.strayed:
            event = next(self._events, None)
            if event is not None and event.func is func:
                return event
            self.strayed = user_line(self.root)
        return None

    def _select(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """A mask picks samples, and may by chance pick as many as in the whole batch."""
        share = self.of(args[0])
        result = run(func, args, kwargs)
        if share is None or share.lost:
            self._keep(result, share or Share(((1.0, result),), picked=True))
        else:
            mapped = _mapped(share, args[0], result, lambda t: func(t, *args[1:], **kwargs))
            self._keep(result, mapped._replace(picked=True))
        return result

    def _other(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """A function without a rule: what it makes of a followed value is followed if it is linear."""
        found = [share for value in _values(args, kwargs) if (share := self.of(value)) is not None]
        result = run(func, args, kwargs)
        if not found:
            return result
        if func in NUMBERS:
            self._keep(result, found[0] if isinstance(result, float) else None)
        elif func in LINEAR and isinstance(result, Tensor):
            self._keep(result, _mapped(found[0], args[0], result, lambda t: func(t, *args[1:], **kwargs)))
        elif func in JOINING:
            self._keep(result, self._joined(func, args, kwargs, result))
        elif isinstance(result, Tensor) and result.is_floating_point():
            self._keep(result, self.lost(*found))
        return result

    def _joined(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Share | None:
        """Several numbers as one tensor: each has its place, and nothing in the others'."""
        parts = list(args[0])
        shares = [self.of(part) or Share(((self.fraction, part),), single=True) for part in parts]
        if any(share.lost for share in shares) or any(part.numel() != 1 for part in parts):
            return self.lost(*shares)
        terms = [
            (factor, func([*zeros[:i], tensor, *zeros[i + 1 :]], *args[1:], **kwargs))
            for zeros in [[torch.zeros_like(part) for part in parts]]
            for i, share in enumerate(shares)
            for factor, tensor in share.terms
        ]
        own = all(map(_is_own, shares, parts))  # else the result may be nan where the terms are not
        if own and len({factor for factor, _ in terms}) == 1:
            terms = [(terms[0][0], result)]
        single = all(share.single for share in shares)
        return Share(tuple(terms), max(share.origin for share in shares), single=single)

    def lost(self, *shares: Share | None) -> Share | None:
        """The share of what is made of these in a way that is not followed."""
        worst = [share for share in shares if share is not None and not self.is_mean(share)]
        if not worst:
            return None
        return Share(
            (),
            max(share.origin for share in worst),
            next((s.lost for s in worst if s.lost), "") or user_line(self.root),
        )

    def _keep_bent(self, result: Any, bent: Bent | None) -> None:
        """Note how a result is made, where no share says it."""
        if not isinstance(result, Tensor | float):
            return
        share = self.of(result)
        if bent is not None and (bent.always or share is None or share.lost):
            self._bent[id(result)] = result, bent
        else:
            self._bent.pop(id(result), None)

    def _keep(self, value: Any, share: Share | None) -> None:
        if share is not None:
            apart = not _is_own(share, value) if isinstance(value, Tensor) else share.apart
            self._known[id(value)] = (value, share._replace(apart=apart))
        else:
            self._known.pop(id(value), None)


class _Step(NamedTuple):
    """One function on the way from the shares of its arguments to that of its result."""

    shares: Shares
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
        return self.mine.result != self.whole.result

    def has_samples(self, position: int) -> bool:
        """Whether an argument has."""
        share = self.known[position] if position < len(self.known) else None
        if share is not None and share.picked:
            return True
        return self.mine.operands[position].shape != self.whole.operands[position].shape

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

    def mapped(
        self, share: Share, position: int, change: Callable[[Tensor], Tensor], factor: float = 1.0
    ) -> Share | None:
        """The result as a linear function of one argument, whose share this is."""
        if share.lost:
            return self.shares.lost(share)
        return _mapped(share, self.args[position], self.result, change, factor)

    def lost(self, *, always: bool = False) -> Share | None:
        """The result, where it cannot be followed."""
        if always:
            return Share((), VALUES, user_line(self.shares.root))
        return self.shares.lost(*self.known)


def _mapped(
    share: Share, value: Any, result: Tensor, change: Callable[[Tensor], Tensor], factor: float = 1.0
) -> Share:
    if share.lost:
        return share
    if _is_own(share, value):
        return share._replace(terms=((share.terms[0][0] * factor, result),))
    return share._replace(terms=tuple((f * factor, change(tensor)) for f, tensor in share.terms))


def _is_own(share: Share, value: Any) -> bool:
    """Whether it is a factor times the very value, so that what is made of one is made of the other."""
    return len(share.terms) == 1 and share.terms[0][1] is value


def _renamed(share: Share | None, old: Tensor, new: Tensor) -> Share | None:
    """The share of a value that is about to be overwritten, with a copy in its place."""
    if share is None:
        return None
    return share._replace(terms=tuple((f, new if tensor is old else tensor) for f, tensor in share.terms))


def _sum_of_two(first: float, second: float) -> "Rule":
    def rule(step: _Step) -> Share | None:
        if not any(step.known):
            return None
        whole_meets_sample = step.grows and any(
            share is not None and not step.has_samples(i) for i, share in enumerate(step.known)
        )
        if whole_meets_sample or "alpha" in step.kwargs or any(share and share.lost for share in step.known):
            return step.lost()
        one, other = step.share(0), step.share(1)
        origin = max(one.origin, other.origin)
        factors = {factor for factor, _ in (*one.terms, *other.terms)}
        own = all(not s.terms or _is_own(s, step.args[i]) for i, s in enumerate((one, other)))
        if len(factors) == 1 and own:
            return Share(((factors.pop(), step.result),), origin)
        shape = step.result.shape
        terms = [(f * first, t) for f, t in one.terms] + [(f * second, t) for f, t in other.terms]
        return Share(tuple((f, t if t.shape == shape else t.expand(shape)) for f, t in terms), origin)

    return rule


def _product(step: _Step) -> Share | None:
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
            and _is_own(one, step.args[0])
            and _is_own(other, step.args[1])
        ):
            factor = one.terms[0][0] * other.terms[0][0]
            return Share(((factor, step.result),), max(one.origin, other.origin))
        return step.lost()
    position = 0 if step.known[0] is not None else 1
    return _by_other(step, position, lambda t: t * step.args[1 - position])


def _quotient(step: _Step) -> Share | None:
    found = step.constant(1)
    if found is not None and not step.kwargs:
        here, there = found
        return _times(step, 0, 1 / here if here else math.inf, 1 / there if there else math.inf,
                      lambda t: t / step.args[1])  # fmt: skip
    if step.known[1] is not None and step.mine.operands[1].elements == 1:
        return step.lost(always=True)
    if step.known[1] is not None or step.kwargs:
        return step.lost()
    return None if step.known[0] is None else _by_other(step, 0, lambda t: t / step.args[1])


def _by_other(step: _Step, position: int, change: Callable[[Tensor], Tensor]) -> Share | None:
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
    step: _Step, position: int, here: float, there: float, change: Callable[[Tensor], Tensor]
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
    if here and math.isfinite(here) and _is_own(share, step.args[position]):
        return Share(((share.terms[0][0] * (there / here), step.result),), VALUES)
    shape = step.result.shape
    terms = [(factor * there, t if t.shape == shape else t.expand(shape)) for factor, t in share.terms]
    return Share(tuple(terms), VALUES)


def _reduction(mean: bool) -> "Rule":
    def rule(step: _Step) -> Share | None:
        if not step.has_samples(0) and step.known[0] is None:
            return step.lost(always=True) if step.is_unclear(0) else None
        mine, whole = (
            event.operands[0].elements / max(1, math.prod(event.result)) for event in (step.mine, step.whole)
        )
        factor = mine / whole if mean and whole else 1.0
        if step.known[0] is None and step.has_pairs(0):
            return None
        if step.grows and step.known[0] is None and factor == 1:
            return None
        return step.mapped(
            step.share(0), 0, lambda t: step.mine.func(t, *step.args[1:], **step.kwargs), factor
        )

    return rule


def _loss(step: _Step) -> Share | None:
    call = reduction_of(step.mine.func, step.args, step.kwargs)
    if step.grows or call.reduction == "none":
        return step.lost()
    if any(share is not None and not all(f == 1 for f, _ in share.terms) for share in step.known):
        return step.lost()
    if not any(map(step.has_samples, range(len(step.known)))):
        return step.lost(always=True) if any(map(step.is_unclear, range(len(step.known)))) else None
    if call.reduction == "sum":
        return Share(((1.0, step.result),))
    if step.mine.divisor is not None and step.whole.divisor is not None:
        whole = float(step.whole.divisor)
        return Share(((float(step.mine.divisor) / whole if whole else math.nan, step.result),), TARGETS)
    if any(map(step.has_pairs, range(len(step.mine.operands)))):
        return None
    counts = [
        max(o.shape[0] if call.reduction == "batchmean" else o.elements for o in event.operands)
        for event in (step.mine, step.whole)
    ]
    return Share(((counts[0] / counts[1], step.result),))


def _contraction(step: _Step) -> Share | None:
    """A product that sums over samples, linear in each of its arguments."""
    known = [(position, share) for position, share in enumerate(step.known) if share is not None]
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


def _choice(step: _Step) -> Share | None:
    """`torch.where` with one condition."""
    condition = step.mine.operands[0].value
    if condition is None or len(step.args) != 3:
        return step.lost()
    chosen = step.args[1 if condition else 2]
    share = step.shares.of(chosen)
    if share is None and isinstance(chosen, Tensor) and chosen.requires_grad:
        return None
    return share or Share(())


Rule = Callable[[_Step], Share | None]


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(both("add add_ __add__ __radd__ __iadd__"), _sum_of_two(1, 1)),
    **dict.fromkeys(both("sub sub_ subtract __sub__ __isub__"), _sum_of_two(1, -1)),
    **dict.fromkeys(both("rsub __rsub__"), _sum_of_two(-1, 1)),
    **dict.fromkeys(both("mul mul_ multiply __mul__ __rmul__ __imul__"), _product),
    **dict.fromkeys(both("div div_ divide true_divide __truediv__ __itruediv__"), _quotient),
    **dict.fromkeys(both("sum count_nonzero"), _reduction(mean=False)),
    **dict.fromkeys(both("mean"), _reduction(mean=True)),
    **dict.fromkeys(both("dot vdot inner matmul mm mv __matmul__ einsum"), _contraction),
    **dict.fromkeys(both("where"), _choice),
    **dict.fromkeys(LOSSES, _loss),
}
RULED = frozenset(_RULES)
FOLLOWED = RULED | SELECTING


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


def _values(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
