"""Padding of a batch that its micro-batches do not have: does what follows go by it?

A unit may give as many words as its longest sample has, such as an encoder that packs its input, so that a
batch has padding which a micro-batch has not. Whether that matters is tried once: a step runs for the batch
on made-up values, and for a micro-batch on its part of them. What later units are given has to be the same,
and what units of this rank make of it.

What stands in the padding is what the unit puts there, where this rank has it. Of a unit that is elsewhere
nobody knows, so that both is tried, something and nothing.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.model.cut import Microbatch, TracedOutputs
from lightning_pipeline.model.random import random_state_kept
from lightning_pipeline.model.rehearsal.made_up_runs import AsOne, MadeUpRuns, are_same, rounding_of
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import (
    LARGEST,
    MadeUp,
    Observed,
    Outputs,
    bytes_of,
    made_up_values,
    values_in,
)
from lightning_pipeline.model.trace import Trace
from lightning_pipeline.registry import parameters_of

_log = logging.getLogger(__name__)
UnitCall = tuple[int, int]
"""A unit, and which call of it."""
Values = Mapping[UnitCall, tuple[list[Tensor], Any]]
"""Tensors that a call of a unit gives, and the structure that they are put into."""
_AT_FIRST = 8
"""Batches without such padding, as where words are packed; later ones are looked at by powers of two."""


class Padding:
    """Tries whether padding has a part in what later units are given, and in what they make of it.

    Args:
        runs: Makes runs of a step.
        outputs: Gives what units return for a micro-batch, on a way and with its random numbers.
        stage_of: The stage of each unit.
        stages: Those of this rank.

    Attributes:
        counted: By step, units of this rank whose padding has a part in what others are given, by name.
        inside: By step, units of this rank that make something else of the same words with padding behind
            them than without, by name.
    """

    def __init__(
        self, runs: MadeUpRuns, outputs: Callable[..., TracedOutputs], stage_of: Sequence[int],
        stages: Collection[int],
    ) -> None:  # fmt: skip
        self._runs, self._outputs, self._stage_of, self._stages = runs, outputs, stage_of, stages
        self._tried: set[tuple[str, tuple[int, ...]]] = set()
        self._looks = Counter[tuple[str, tuple[int, ...]]]()
        self.counted: dict[str, list[str]] = {}
        self.inside: dict[str, list[str]] = {}

    def look(self, step: Step, whole: Microbatch, sizes: Sequence[int], as_one: AsOne) -> None:
        """A batch begins: try it, in the first one that has padding which a micro-batch has not.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
            as_one: Gives its trace as one, and what units return for it.
        """
        route = step.routes[0]
        key = step.name, route.trace.path
        goes_one_way = all(one is route for one in step.routes)
        if key in self._tried or not (route.trace.follows_values and goes_one_way):
            return
        self._looks[key] += 1
        if (looks := self._looks[key]) > _AT_FIRST and looks & (looks - 1):  # each size is traced for it
            return
        try:
            trace, outputs = as_one(whole)
            for number, padded in self._narrower(step, sizes, outputs):
                self._tried.add(key)
                if bytes_of(outputs) <= LARGEST:
                    found = self._counts(step, whole, trace, outputs, number, padded)
                    here = [unit for unit in padded.units if None in found and self._is_here(unit)]
                    inside = sorted(unit for unit in found if unit is not None)
                    self.counted[step.name] = [trace.units[unit].name for unit in here]
                    self.inside[step.name] = [trace.units[unit].name for unit in inside]
                    return
        except Exception as error:  # the user's code, on made-up values
            self._tried.add(key)
            _log.debug("whether padding has a part in %s cannot be tried: %s", step.name, error)

    def _is_here(self, unit: int) -> bool:
        return self._stage_of[unit] in self._stages

    def _is_run(self, unit: int) -> bool:
        module = self._runs.patches.units[unit].module
        size = sum(p.numel() * p.element_size() for p in parameters_of(module))
        return self._is_here(unit) and size <= LARGEST

    def _narrower(
        self, step: Step, sizes: Sequence[int], outputs: Outputs
    ) -> Iterator[tuple[int, "_Padded"]]:  # fmt: skip
        """Micro-batches for which units give less for each sample than for the batch, by number."""
        route = step.routes[0]
        by_values = {(call.unit, call.nth) for call in route.trace.calls if call.by_values}
        decided = {call: one for call, one in outputs.items() if call in by_values}
        every = [
            self._outputs(route, batch, partial(step.seeds.microbatch, number))
            for number, batch in enumerate(step.microbatches)
        ]
        joined = {
            (*call, leaf): _joined(spec.shape, call, leaf, every)
            for call, (_, specs) in decided.items()
            for leaf, spec in enumerate(specs)
        }
        for number, own in enumerate(every):
            padded = _Padded(sum(sizes[:number]), sizes[number], sum(sizes), decided, own, joined)
            if padded.units:
                yield number, padded

    def _counts(
        self, step: Step, whole: Microbatch, trace: Trace, outputs: Outputs, number: int, padded: "_Padded"
    ) -> frozenset[int | None]:  # fmt: skip
        """See `_Padded.differing`, for anything that may stand in the padding."""
        own = frozenset(filter(self._is_run, trace.path))

        def run(batch: Microbatch, given: Values, like: Trace, seed: int = 0) -> _Seen:
            forwards = _Forwards(self._runs.patches.originals, own)
            runner = MadeUp(given, like, own, forwards.all)
            with self._runs.apart(step), _in_evaluation(self._runs.root):  # a dropout draws for other sizes
                self._runs.run(step, batch, runner, torch.no_grad(), seed=seed)
            return _Seen(runner.seen, forwards.gave)

        def differing(given: Values) -> frozenset[int | None]:
            theirs, drawn = run(whole, given, trace), run(whole, given, trace, seed=1)
            mine = run(step.microbatches[number], padded.cut(given), step.routes[0].trace)
            return padded.differing(theirs, mine, drawn, [one.module for one in trace.units])

        values = made_up_values(outputs)
        fillings = padded.fillings(values, run(whole, values, trace).gave)
        return frozenset[int | None]().union(
            *(frozenset.intersection(*map(differing, each)) for each in fillings)
        )


class _Seen(NamedTuple):
    """What a run has seen.

    Attributes:
        given: What each unit was given.
        gave: What calls of units that did run gave; nothing where they raised.
    """

    given: Observed
    gave: Mapping[UnitCall, list[Tensor]]


class _Forwards:
    """The forwards of all units; some note what they give.

    Args:
        originals: The forwards.
        units: Those that note it.

    Attributes:
        all: By number of the unit.
        gave: What was noted.
    """

    def __init__(self, originals: Sequence[Callable[..., Any]], units: Collection[int]) -> None:
        self.all = list(originals)
        self.gave: dict[UnitCall, list[Tensor]] = {}
        self._counts: Counter[int] = Counter()
        self._inside = False
        for unit in units:
            self.all[unit] = partial(self._noted, unit, originals[unit])

    def _noted(self, unit: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # a unit that is called by another is part of that
            return forward(*args, **kwargs)
        call = unit, self._counts[unit]
        self._counts[unit] += 1
        self._inside = True
        try:
            with random_state_kept():
                self.gave[call] = values_in(forward(*args, **kwargs))
        except Exception as error:  # the user's code, on made-up values
            _log.debug("unit %s does not run on made-up values: %s", unit, error)
        finally:
            self._inside = False
        return None


def _joined(shape: Sequence[int], call: UnitCall, leaf: int, every: Sequence[Outputs]) -> frozenset[int]:
    """Dimensions along which a batch has what its micro-batches have together, such as words that are packed.

    Of a width it has what the widest of them has.
    """
    own = [one[call][1][leaf].shape for one in every if call in one and leaf < len(one[call][1])]
    if len(own) < len(every) or any(len(one) != len(shape) for one in own):
        return frozenset()
    return frozenset(
        dim for dim, size in enumerate(shape) if max(sizes := [one[dim] for one in own]) < size == sum(sizes)
    )


@contextmanager
def _in_evaluation(root: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


class _Padded:
    """What units give for the batch, beside a micro-batch which may have less padding.

    Args:
        start: Its first sample in the batch.
        size: Its samples.
        total: Those of the batch.
        outputs: What units return for the batch, of which values decide how much that is.
        own: What all of them return for the micro-batch.
        joined: Dimensions of no width, by unit, number of the call and tensor; see `_joined`.

    Attributes:
        units: Those that give fewer of something, by number.
    """

    def __init__(
        self, start: int, size: int, total: int, outputs: Outputs, own: Outputs,
        joined: Mapping[tuple[int, int, int], Collection[int]],
    ) -> None:  # fmt: skip
        self._start, self._size, self._total, self._own = start, size, total, own
        self._decided = list(outputs)
        self._lengths: set[tuple[int, int]] = set()
        self.units: list[int] = []
        for call, (_, specs) in outputs.items():
            pairs = enumerate(zip(specs, own[call][1] if call in own else (), strict=False))
            found = {
                one
                for leaf, (theirs, mine) in pairs
                for one in self._shorter(theirs.shape, mine.shape, joined.get((*call, leaf), ()))
            }
            if found and call[0] not in self.units:
                self.units.append(call[0])
            self._lengths |= found

    def _shorter(
        self, theirs: Sequence[int], mine: Sequence[int], joined: Collection[int]
    ) -> Iterator[tuple[int, int]]:
        """Sizes for the batch and for the micro-batch, of dimensions that are no samples'."""
        if len(theirs) == len(mine):
            pairs = [one for dim, one in enumerate(zip(theirs, mine, strict=True)) if dim not in joined]
            yield from (one for one in pairs if one[0] > one[1] and one != (self._total, self._size))

    def _rows(self, tensor: Tensor, shape: Sequence[int]) -> tuple[Tensor | None, int | None]:
        """What the micro-batch has of a tensor of the batch, by its shape, and the dimension of its samples.

        Nothing where that is not clear.
        """
        if tensor.dim() != len(shape):
            return None, None
        samples = None
        for dim, (there, here) in enumerate(zip(tensor.shape, shape, strict=True)):
            if samples is None and (there, here) == (self._total, self._size):
                tensor, samples = tensor.narrow(dim, self._start, here), dim
            elif (there, here) in self._lengths:
                tensor = tensor.narrow(dim, 0, here)
            elif there != here:
                return None, None
        return tensor, samples

    def cut(self, values: Values) -> Values:
        """Those of the micro-batch."""
        found: dict[UnitCall, tuple[list[Tensor], Any]] = {}
        for call, (tensors, structure) in values.items():
            pairs = list(zip(tensors, self._own[call][1], strict=True))
            parts = [self._rows(tensor, spec.shape)[0] for tensor, spec in pairs]
            own = made_up_values({call: (structure, self._own[call][1])})[call][0]
            found[call] = (
                [mine if one is None else one for one, mine in zip(parts, own, strict=True)],
                structure,
            )
        return found

    def fillings(self, values: Values, gave: Mapping[UnitCall, list[Tensor]]) -> list[list[Values]]:
        """Values to try, each with all that may stand in the padding: one thing if this rank has the units.

        Where it has, words are the units' own, and once more each sample's are all like its first, so that
        what stands in the padding may be the largest.

        Args:
            values: Made-up ones.
            gave: What units gave that did run.
        """
        known, unknown = dict(values), list[UnitCall]()
        for call in self._decided:
            tensors, structure = values[call]
            real = gave.get(call, [])
            if [(one.shape, one.dtype) for one in real] == [(one.shape, one.dtype) for one in tensors]:
                known[call] = real, structure
            else:
                unknown.append(call)
        alike = known | self._changed(known, self._decided, lambda words, _: words.copy_(words[:1].clone()))
        empty = self._changed(known, unknown, lambda _, padding: padding.zero_())
        return [[one, one | empty] if unknown else [one] for one in (known, alike)]

    def _changed(
        self, values: Values, calls: Sequence[UnitCall], change: Callable[[Tensor, Tensor], object]
    ) -> dict[UnitCall, tuple[list[Tensor], Any]]:
        """Values of these calls with other words or another padding, along the first dimension of views."""
        found = {}
        for call in calls:
            tensors = [one.clone() for one in values[call][0]]
            for tensor in filter(torch.is_floating_point, tensors):
                for dim, size in enumerate(tensor.shape):
                    for here in [here for there, here in self._lengths if there == size]:
                        along = tensor.movedim(dim, 0)
                        change(along[:here], along[here:])
            found[call] = tensors, values[call][1]
        return found

    def differing(
        self, theirs: _Seen, mine: _Seen, drawn: _Seen, modules: Sequence[nn.Module]
    ) -> frozenset[int | None]:
        """The units that give something else for the same samples in two runs; None if one is given it.

        Args:
            theirs: What a run for the batch has seen.
            mine: What one for the micro-batch has.
            drawn: What the first would have with other random numbers; what differs there says nothing.
            modules: The units.
        """
        found, counts = set[int | None](), Counter[int]()
        for (unit, whole), (same, part), (_, again) in zip(
            theirs.given, mine.given, drawn.given, strict=False
        ):
            if unit is None or unit != same:
                break  # it went elsewhere, which says nothing
            call, rounding = (unit, counts[unit]), rounding_of(modules[unit], whole)
            counts[unit] += 1
            given = self._compared((whole, part, again), rounding)
            found |= {None} if True in given else set()
            gave = [seen.gave.get(call, []) for seen in (theirs, mine, drawn)]
            if given == [False] * len(whole) and any(self._compared(gave, rounding, each=True)):
                found.add(unit)
        return frozenset(found)

    def _compared(
        self, seen: Sequence[Sequence[Tensor]], rounding: float, *, each: bool = False
    ) -> list[bool | None]:
        """Of each tensor of a batch, whether a micro-batch has something else; None where nobody can tell.

        Args:
            seen: The batch's, the micro-batch's, and the batch's with other random numbers.
            rounding: By how much of the largest number two that are the same may differ.
            each: Whether words differ only if those of each sample do: what stands in the padding of a
                shorter one may be anything, and the longest has none.
        """
        found: list[bool | None] = []
        for one, other, again in zip(*seen, strict=False):
            known = one.dtype == other.dtype and are_same(one, again, 0.0)
            rows, samples = self._rows(one, other.shape) if known else (None, None)
            if rows is None:
                found.append(None)
            elif each and samples is not None and rows.numel() < one.numel() // self._total * self._size:
                pairs = zip(rows.unbind(samples), other.unbind(samples), strict=True)
                found.append(not any(are_same(*pair, rounding) for pair in pairs))
            else:
                found.append(not are_same(rows, other, rounding))
        return found
