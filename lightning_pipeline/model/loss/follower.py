"""Whether and how the numbers of a kind of step are followed, batch by batch."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.loss.bent import NOBODY_KNOWS, Bent
from lightning_pipeline.model.loss.events import SHAPES, VALUES, OwnDivisor, Share, Whole
from lightning_pipeline.model.loss.rules import FOLLOWED
from lightning_pipeline.model.loss.shares import Shares

_MOST_PATHS, _MOST_SHAPES = 256, 16
_MOST_CHANCES = 16  # batches in which a way that one has gone is waited for
_WAYS_OUT = (
    "override `microbatch_weight(batch)` on the LightningModule with what it divides by (what the "
    "micro-batch counts for), or ask for the mean over samples of the micro-batches' losses by "
    "PipelineStrategy(loss_weighting='samples'); num_microbatches=1, or whole_steps=True, which is slower, "
    "gives the step the whole batch"
)
_WAYS_OUT_OF_LOGS = "num_microbatches=1, or whole_steps=True, which is slower, gives the step the whole batch"
_AT_ONCE = (
    "let the last stage compute it once for the batch, as one device does, by "
    "PipelineStrategy(loss_over_batch=True, schedule='GPipe') (a contrastive or a Dice loss); otherwise, "
)


def check_no_class_weights(step: str, inside: Mapping[str, str]) -> None:
    """Refuse a mean by weights of classes inside a unit: nobody sees what it divides by.

    Args:
        step: Name of the user's method.
        inside: Names of such units, each with the line.

    Raises:
        SplitError: There is one.
    """
    for unit, line in inside.items():
        raise SplitError(
            f"unit {unit!r} computes a mean over classes with weights of these, which one device divides by "
            "the weights of the whole batch's targets, and a micro-batch by those of its own. Compute the "
            f"loss in {step}, or let the unit be cut finer; otherwise, {_WAYS_OUT} [at {line}]"
        )


class Part(NamedTuple):
    """What a number of a micro-batch is of the batch's.

    Attributes:
        value: This part of the sum of all; None where nothing is followed.
        differs: Whether it is anything else than the number weighted by samples.
        is_known: Whether it is known to be the number of the batch, as a sum over samples.
        bent: How it was worked out, where it is no sum.
        is_unclear: Whether nothing could be found out, so that the mean by samples is a guess.
        read: Of a Python number, which of those that the step reads it is: `max(a, b)` may be one of several.
    """

    value: Any = None
    differs: bool = False
    is_known: bool = False
    bent: Bent | None = None
    is_unclear: bool = False
    read: int = 0


class Path:
    """Notes which functions that may make a loss a micro-batch calls, where nothing is to be followed.

    Attributes:
        taken: These.
        flags: What it was told by numbers of tensors that it decides by.
        recipes: None: nobody asks what values are made of.
    """

    def __init__(self) -> None:
        self.recipes: None = None
        self.taken: list[Any] = []
        self.flags: list[bool] = []

    def unit(self, number: int, nth: int) -> None:
        """A unit was called."""

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Run a function."""
        if func in FOLLOWED:
            self.taken.append((func, kwargs.get("reduction")))
        result = run(func, args, kwargs)
        if type(result) is bool:
            self.flags.append(result)
        return result


class Follower:
    """Finds what each number that a step works out is worth in the batch, on the stage that has it.

    Where the numbers of a batch turned out to be plain means over samples, which shapes alone say, the
    batches after it are not looked at.

    Args:
        root: The LightningModule.
        step: Name of its method.

    Attributes:
        worth: What the losses of this batch are multiplied with, where that had to be tried.
        doubt: Of what may be wrong with the numbers of this batch, which was not followed.
    """

    def __init__(self, root: nn.Module, step: str) -> None:
        self._root, self._step = root, step
        self._fractions: Sequence[float] = ()
        self._key: tuple[Any, ...] = ()
        self._targets: list[tuple[int, int]] | None = None  # of a step that is plain where these are complete
        self._wholes: Sequence[Whole] = ()
        self._shares: Shares | None = None
        self._path: Path | None = None  # of a micro-batch that is not looked at
        self._plain_paths: set[tuple[Any, ...]] = set()
        self._ways: set[int] = set()  # of the batch
        self._plain_ways: set[int] = set()
        self._paths: list[Shares] = []
        self._owed: set[tuple[Any, ...]] = set()  # ways of micro-batches of which nobody knows what they are
        self._chances = 0
        self._plain = True
        self._bends = False  # something is logged that is no mean, so that each batch is followed
        self._by_shapes: dict[tuple[Any, ...], Sequence[Whole]] = {}  # where shapes alone say all else
        self._given_up = False
        self._said: set[str] = set()
        self._computed: list[tuple[str, Tensor]] | None = None  # in the first micro-batch
        self._tried: Callable[[bool], list[float] | None] = lambda by_metrics: None
        self._own: list[OwnDivisor] = []  # of the micro-batches that had one
        self._plainly: list[Tensor] = []  # losses of the others
        self._astray: Shares | None = None  # of the first that went another way, to a loss of 0
        self._about: float | None = None  # the batch's divisor, as far as the first of them tells
        self.worth: list[float] | None = None
        self.doubt: str | None = None
        self._by_values, self._is_torn, self._has_loss, self._is_unlike = False, False, False, False
        self._flags: set[tuple[bool, ...]] = set()  # of the micro-batches
        self._is_weighed, self._falls_back = False, False
        self._is_harmless = False  # whether these differ where losses do not
        self._number = 0  # of the micro-batch that runs

    def warn_of_losses(self, inside: Iterable[tuple[str, int]], batch: Sequence[Tensor]) -> None:
        """Say where a loss inside a unit may leave out targets of a batch.

        Args:
            inside: Names of units, and the class that a mean inside each leaves out.
            batch: The batch's tensors.
        """
        whole_numbers = [tensor for tensor in batch if not tensor.is_floating_point()]
        for unit, left_out in inside:
            if unit not in self._said and any(bool((t == left_out).any()) for t in whole_numbers):
                self._said.add(unit)
                self._say(
                    f"unit {unit!r} computes a mean over classes that leaves out {left_out}, which stands "
                    "in the batch: inside a unit it is weighted by samples, not by the targets that count. "
                    f"Compute the loss in {self._step}, or let the unit be cut finer; otherwise, {_WAYS_OUT}"
                )

    def begin(
        self,
        fractions: Sequence[float],
        batch: Sequence[Tensor],
        rehearse: Callable[[], Sequence[Whole] | str],
        tried: Callable[[bool], list[float] | None] = lambda by_metrics: None,
        *,
        by_values: bool = False,
        is_torn: bool = False,
        called: Sequence[int] = (),
        is_weighed: bool = False,
        mixes: bool = False,
    ) -> None:
        """A batch comes.

        Args:
            fractions: Samples of each micro-batch over those of the batch.
            batch: Its tensors.
            rehearse: Runs the step over the whole batch: what was seen, for each micro-batch, or why the
                step cannot be run once more.
            tried: Tries what each micro-batch's loss is worth, told whether metrics make it; None where it is
                no part of a sum.
            by_values: Whether values decide how much units return, so that shapes alone say nothing.
            is_torn: Whether it is known that micro-batches decide otherwise by what is in the batch.
            called: For each micro-batch what tells the functions that it is about to call; 0: nobody knows.
            is_weighed: Whether the user has said what the loss of a micro-batch counts for.
            mixes: Whether micro-batches are given their part of what the step makes of all samples: their
                losses then are made of the batch's numbers, and are followed if they can be.
        """
        self._is_weighed, self._falls_back = is_weighed and not mixes, is_weighed and mixes
        self._by_values, self._is_torn, self._flags, self._is_unlike = by_values, is_torn, set(), False
        self._has_loss = self._step != "training_step"
        self._tried, self.worth = cache(tried), None
        self._fractions, self._wholes, self._shares, self._path = fractions, (), None, None
        self._paths, self._computed, self.doubt = [], None, None
        self._own, self._plainly, self._about, self._astray = [], [], None, None
        if self._given_up:
            return
        self._ways = {one for one in called if one}
        self._key = (*called, *fractions, *(tuple(tensor.shape) for tensor in batch))
        is_plain = self._targets is not None and self._ways <= self._plain_ways
        if is_plain and not _any_left_out(batch, self._targets or ()):
            if not self._bends:
                return
            if self._key in self._by_shapes:
                self._wholes = self._by_shapes[self._key]
                return
        found = rehearse()
        if isinstance(found, str):
            self._given_up = True
            self._say(
                f"{self._step} {found}, so that it cannot be run once more to find out what one device would "
                f"divide {self._numbers} by: that is taken for a mean over samples. If it is divided by "
                f"anything else (tokens, a mask, weights), {self._ways_out}"
            )
            return
        self._wholes = found
        self._plain = not any(whole.ragged for whole in self._wholes)

    @property
    def _numbers(self) -> str:
        return "what it logs" if self._is_weighed else "its loss"

    @property
    def _ways_out(self) -> str:
        return _WAYS_OUT_OF_LOGS if self._is_weighed else _WAYS_OUT

    def microbatch(self, microbatch: int) -> "Shares | Path":
        """A micro-batch comes: who sees its functions."""
        self._compare_path()
        self._number = microbatch
        if self._wholes:
            self._shares = Shares(
                self._wholes[microbatch], self._root, self._fractions[microbatch], by_values=self._by_values
            )
            self._paths.append(self._shares)
            return self._shares
        self._path = Path()
        return self._path

    @property
    def compares_losses(self) -> bool:
        """Whether the loss is to be that of the batch as one: nothing else was said of it."""
        return not (self._said or self._is_weighed)

    def left(self) -> None:
        """The step of the micro-batch is over: only its way is kept, none of its values."""
        seen = self._shares or self._path
        self._flags |= set() if seen is None else {tuple(seen.flags)}
        if self._shares is not None:
            self._shares.forget()
            self._shares = None

    def _compare_path(self) -> None:
        """Whether a micro-batch that was not looked at went a way that is known to be plain."""
        path, self._path = self._path, None
        if path is None or self._given_up or tuple(path.taken) in self._plain_paths:
            return
        self._targets = None
        self._plain_ways.clear()
        self._owed.add(tuple(path.taken))
        self._chances = _MOST_CHANCES
        self.doubt = (
            f"{self._step} calls other functions between its units than in the batches before, whose numbers "
            f"were plain means over samples: {self._numbers} is weighted by samples in this batch, and the "
            f"next ones are looked at again. If it is divided by anything else, {self._ways_out}"
        )

    def say_doubt(self, *, is_settled: bool = False) -> None:
        """After the batch: warn of what no look at the batch as one has settled.

        Args:
            is_settled: Whether that has come to the same numbers: what the step decides makes no loss.
        """
        self._is_harmless = self._is_harmless or (is_settled and len(self._flags) > 1)
        if self.doubt is not None and not is_settled:
            self._say(self.doubt)

    def part(self, value: Any, *, always: bool = False) -> Part:
        """This micro-batch's part of a number that the step hands out.

        Args:
            value: The number.
            always: Whether a number that is a mean over samples is to be followed in each batch.
        """
        shares = self._shares
        if shares is None or self._is_unlike:
            return Part()
        share, bent = shares.of(value), shares.bent(value)
        drawn = shares.whole.unclear and (shares.whole.ragged or (bent and bent.origins() != {SHAPES}))
        is_astray, follows = shares.may_be_another(value, followed=True), share is not None and not share.lost
        adds = bent is not None and bent.is_sum and follows and not is_astray
        bent = NOBODY_KNOWS if bent is not None and shares.may_be_another(value) and not adds else bent
        if bent is not None and not drawn:
            self._bends = True
            self._plain = self._plain and VALUES not in bent.origins()
            total = share.total() if share is not None and follows and bent.is_sum else None
            return Part(
                value * shares.fraction if total is None else total, bent=bent, is_known=total is not None
            )
        self._note(shares, share)
        if share is None or share.lost or is_astray or self._is_doubtful(shares, share):
            unclear = shares.is_astray or (share is not None and bool(share.lost))
            return Part(value * shares.fraction, is_unclear=unclear)
        self._bends = self._bends or always
        total = share.total()
        value = 0.0 if total is None else total
        return Part(value, not shares.is_mean(share), is_known=True, read=share.read)

    def is_of_all(self, value: Any) -> bool:
        """Whether a tensor has a value for each sample in which a number of all of them is."""
        return self._shares is not None and self._shares.is_of_all(value)

    def unlike(self) -> None:
        """A unit gives another number or text than where the batch was looked at as one, without values."""
        self._is_unlike = True

    def know(self, value: Any, bent: Bent) -> None:
        """A value of the micro-batch that runs comes from elsewhere, with how the batch's is made."""
        if self._shares is not None:
            self._shares.know(value, bent)

    def loss(self, loss: Tensor) -> Share | None:
        """The share of a loss; None where it is weighted by samples, or as the user says.

        Raises:
            SplitError: It is divided by what differs between micro-batches, and could not be followed.
        """
        known, self._has_loss = len(self._own), True
        if self._is_weighed:
            return None
        if self._is_unlike:
            self._doubt_unlike(loss)
        try:
            share = None if self._is_unlike else self._share_of(loss)
        except SplitError:
            if not self._falls_back:
                raise
            share = None
            self._say(
                f"{self._step} mixes samples of the batch, so that numbers of the batch are in the losses of "
                "micro-batches, and what these are of the batch's cannot be followed: they count for what "
                "`microbatch_weight(batch)` or `loss_weighting` says, which may divide them twice: "
                f"{_WAYS_OUT_OF_LOGS}"
            )
        if len(self._own) == known:
            self._plainly.append(loss.detach())
        return share

    def _doubt_unlike(self, loss: Tensor) -> None:
        """A loss that is weighted by samples now is in doubt where it is known to be no plain mean."""
        shares = self._shares
        share = None if shares is None else shares.of(loss)
        if shares is not None and share is not None and not shares.is_mean(share):
            self.doubt = (
                f"{self._step} makes its loss of a number or text that a unit returns, and which is another "
                "one than where the batch was looked at as a whole: this batch is weighted by samples. If "
                f"such a loss is divided by anything else, {_WAYS_OUT}"
            )

    def _share_of(self, loss: Tensor) -> Share | None:
        shares = self._shares
        if shares is None:
            return None
        share = shares.of(loss)
        self._end(shares)
        self._note(shares, share)
        if self._is_doubtful(shares, share):
            return None
        if share is not None and share.own is not None:
            self._compare_computed(shares, loss)
            return self._own_share(share.own, loss)
        is_other = shares.may_be_another(loss, followed=True)
        is_lost = share is None or bool(share.lost)
        is_astray = (bool(shares.strayed) and is_lost) or is_other or shares.ends_early
        if is_astray and self.tries():
            return self._tried_share(loss)
        if is_astray and not bool(loss.detach()):  # it may have had nothing to divide
            self._astray = self._astray or shares
            return None
        if is_astray:
            self._stray(shares)
        self._compare_computed(shares, loss)
        if self._tries_bent(shares, share, loss):
            return self._tried_share(loss)
        if share is None or shares.is_mean(share):
            return None
        if share.lost:
            raise self._lost(f"from {share.lost} on")
        return share

    def _tries_bent(self, shares: Shares, share: Share | None, loss: Tensor) -> bool:
        """Whether a trial says what a loss is worth that is no sum over samples by itself; else says so."""
        bent, follows = shares.bent(loss), share is not None and not share.lost
        if bent is None or (bent.by_unit and follows):
            return False
        if share is not None and not (follows or shares.is_mean(share)):
            return False
        if bent.is_of_metrics and self.tries(by_metrics=True):
            return True
        self._say(
            f"what {self._step} returns is made of sums over samples in another way than by adding up, "
            "such as the root of a mean: gradients are the mean of the micro-batches', as in gradient "
            "accumulation, and not those of one device, which "
            "PipelineStrategy(loss_over_batch=True, schedule='GPipe') gives; loss_weighting='samples' "
            "says that the mean is meant"
        )
        return False

    def _end(self, shares: Shares) -> None:
        shares.end()
        if shares.makes_less:
            self.doubt = (
                f"{self._step} calls more functions for the batch as a whole than for a micro-batch, such as "
                "where a number of samples decides: the loss is taken for what its micro-batches add up to. "
                f"If it is not, {_WAYS_OUT}"
            )

    def _lost(self, where: str) -> SplitError:
        return SplitError(
            f"what {self._step} returns is divided by what differs between micro-batches, and cannot be "
            f"followed {where}: {_AT_ONCE}{_WAYS_OUT}"
        )

    def _own_share(self, own: OwnDivisor, loss: Tensor) -> Share:
        """What units divide by is known when all micro-batches have run: until then by about as much."""
        self._own.append(own)
        if not own.weight:  # 0/0 counts for nothing; of more over nothing the dividend is not known
            if bool(loss.detach().isinf()):
                raise self._lost("where a micro-batch divides by nothing")
            return Share(())
        if self._about is None:
            self._about = own.weight / (self._fractions[self._number] or 1.0)
        return Share(((own.weight / self._about, loss),))

    def found(self) -> tuple[list[float] | None, Callable[[], None], tuple[float, float] | None]:
        """After the batch: what losses were worth, what says a doubt, and what is left to multiply with.

        The last is for the loss and for gradients; None where nothing is. Where no micro-batch counted, so
        that none had a gradient, the second is 0, or nan where one device has that.

        Raises:
            SplitError: Some micro-batches have divided by what units decide, and others by something else.
        """
        is_said = self._is_torn or self._is_harmless or self._is_weighed
        if len(self._flags) > 1 and not is_said and self.doubt is None:
            self.doubt = (
                f"{self._step} decides by what layers compute (`if loss > bound`), and the micro-batches of "
                "one have decided otherwise than each other, where one device decides once for all of its "
                "samples: decide sample by sample with torch.where, or use num_microbatches=1; "
                "whole_steps=True, which is slower, gives the step the whole batch"
            )
        return self.worth, self.say_doubt, self._left_to_divide()

    def _left_to_divide(self) -> tuple[float, float] | None:
        if not self._own and self._astray is not None:
            self._stray(self._astray)
        if not self._own:
            return None
        if any(bool(one) for one in self._plainly):
            raise self._lost("in those micro-batches that take another way")
        divisor = max(sum(one.total for one in self._own), *(one.least for one in self._own))
        if self._about is not None:
            factor = self._about / divisor if divisor else math.nan
            return factor, factor
        is_zero = bool(divisor) or all(one.is_count for one in self._own)
        return 0.0 if divisor else math.nan, 0.0 if is_zero else math.nan

    def tries(self, *, by_metrics: bool = False) -> bool:
        """Whether a run on made-up values says what losses are worth; then that is what they are.

        Args:
            by_metrics: Whether the loss is made of what metrics give.
        """
        self.worth = self._tried(by_metrics)
        if self.worth is not None:
            self._plain = False  # in the next batch they may be worth something else
        return self.worth is not None

    def _tried_share(self, loss: Tensor) -> Share:
        assert self.worth is not None, "it was tried"
        return Share(((self.worth[self._number], loss),))

    def _compare_computed(self, shares: Shares, loss: Tensor) -> None:
        """A mean times a number that a unit computed is that of one device if that is always the same."""
        computed = shares.computed_in(loss)
        if self._computed is None:
            self._computed = computed
        self._plain = self._plain and not computed
        for (line, value), (_, before) in zip(computed, self._computed, strict=False):
            if not torch.allclose(value, before, rtol=1e-5):
                raise SplitError(
                    "a mean over samples is multiplied with or divided by a number that a unit computes from "
                    f"the micro-batch, so that {self._step} cannot be that of one device: return a value for "
                    f"each sample from the unit; otherwise, {_WAYS_OUT} [at {line}]"
                )

    def _stray(self, shares: Shares) -> None:
        """The micro-batch went another way than the batch as a whole, such as a loop over samples."""
        whole = shares.whole
        if whole.ragged or whole.reads or None in whole.targets:
            raise SplitError(
                f"what {self._step} returns cannot be compared with what it would for the whole batch: "
                f"from {shares.line} on, a micro-batch calls other functions, and values of the batch "
                f"decide what the loss is divided by: {_AT_ONCE}{_WAYS_OUT}"
            )
        self._say(
            f"{self._step} calls other functions for a micro-batch than for the batch as a whole, from "
            f"{shares.line} on, so that its loss is taken for a mean over samples. If it is not: "
            f"{_WAYS_OUT}"
        )

    def _is_doubtful(self, shares: Shares, share: Share | None) -> bool:
        """Whether random numbers decide, of which the whole batch's are not known."""
        whole = shares.whole
        if not whole.unclear or share is None:
            return False
        if not share.lost and share.origin == SHAPES and not whole.ragged:
            return False
        self._say(
            f"{self._step} draws random numbers with {whole.unclear}, of which it cannot be said what they "
            f"would be for the batch as a whole, so that {self._numbers} is taken for a mean over samples. "
            f"If what it is divided by is drawn, {self._ways_out}"
        )
        return True

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text)

    def end(self) -> None:
        """The batch is done: look at the next ones only where this one needed it."""
        self._compare_path()
        wholes, self._wholes, self._shares = self._wholes, (), None
        self._compare_means()
        is_known = self._has_loss and not self._by_values
        if not (is_known and wholes and self._plain) or any(None in whole.targets for whole in wholes):
            return
        if len(self._plain_paths) < _MOST_PATHS:
            self._plain_paths.update(tuple(shares.taken) for shares in self._paths)
        self._plain_ways |= self._ways if len(self._plain_ways) < _MOST_PATHS else set()
        self._owed -= self._plain_paths
        self._chances -= 1
        if self._owed and self._chances > 0:
            return
        targets = {target for whole in wholes for target in whole.targets if target is not None}
        self._targets = sorted(targets.union(self._targets or ()))
        differs = any(shares.differs for shares in self._paths)
        if self._bends and not differs and len(self._by_shapes) < _MOST_SHAPES:
            self._by_shapes[self._key] = [
                replace(whole, remembered=True, calls=whole.calls.without_values()) for whole in wholes
            ]

    def _compare_means(self) -> None:
        """Whether the micro-batches have all values over which one device takes a mean."""
        for found in zip(*(shares.means for shares in self._paths), strict=False):
            line, _, whole = found[0]
            alike = len({(one[0], one[2]) for one in found}) == 1 and len(found) == len(self._fractions)
            here = sum(one[1] for one in found)
            if alike and not math.isclose(here, whole) and not self._is_weighed and line not in self._said:
                self._said.add(line)
                self._say(
                    f"{self._step} takes a mean of {whole:g} values for a batch as one, as one device does, "
                    f"and of {here:g} in its micro-batches, as a layer gives as much for each sample as the "
                    "longest that it is given has: padding counts in one and not in the other. Leave it out "
                    "(`ignore_index`, a mask), or let the layer give the width of what it is given [at "
                    f"{line}]"
                )

    def _note(self, shares: Shares, share: Share | None) -> None:
        """Whether shapes alone say that a number is a plain mean, or all targets of its loss count."""
        if share is not None and (share.origin == VALUES or not shares.is_mean(share)):
            self._plain = False


def _any_left_out(batch: Sequence[Tensor], targets: Sequence[tuple[int, int]]) -> bool:
    """Whether a loss over classes leaves out any target of a batch."""
    if any(position >= len(batch) for position, _ in targets):
        return True
    return any(bool((batch[position] == left_out).any()) for position, left_out in set(targets))


def seeds_of(share: Share, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Where the backward of a loss begins, and with what.

    Args:
        share: Of the loss.
        scale: Of all gradients.
    """
    return [
        (tensor, torch.full_like(tensor.detach(), factor * scale))
        for factor, tensor in share.terms
        if factor and tensor.requires_grad
    ]
