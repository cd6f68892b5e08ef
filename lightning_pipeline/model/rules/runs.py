"""Runs of a step in which units answer with values that nobody computed, so that only glue is run."""

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.places import MISSING, Effect, Kept
from lightning_pipeline.model.random import seed_torch
from lightning_pipeline.model.rules.made_up import (
    MadeUp,
    Observed,
    dimension_of,
    joined_values,
    made_up,
    values_in,
)
from lightning_pipeline.model.rules.rows import Pieces
from lightning_pipeline.model.rules.values import own_containers
from lightning_pipeline.model.tensors import TensorSpec, dict_like, is_placeholder, map_tensors, set_values
from lightning_pipeline.model.trace import Trace, UnitPatches, stub_sinks

_log = logging.getLogger(__name__)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """Two micro-batches and both as one.

    Attributes:
        one: Arguments of the first, and what units return for it.
        other: Of the second.
        whole: Of both.
        back: Of both, the second first.
        sizes: Samples of the two.
        really: Units that run for what they keep of their own, though what they return is made up.
        given: Outputs of units that this rank has at the end of the step; None where that is of no use.
        mended: Whether micro-batches are given their part of what the step mixes, so that they compute what
            the batch does, though these runs do not.
        twice: The first micro-batch and itself again as one; None where the second has another size.
        blocks: How often all samples stand one after the other among the rows of an output of a unit.
    """

    one: tuple[Arguments, Trace]
    other: tuple[Arguments, Trace]
    whole: tuple[Arguments, Trace]
    back: tuple[Arguments, Trace]
    sizes: tuple[int, int]
    really: frozenset[int] = frozenset()
    given: frozenset[tuple[int, int, int]] | None = None
    mended: bool = False
    twice: Arguments | None = None
    blocks: Mapping[tuple[int, int, int], int] = field(default_factory=dict)

    def pieces(self, batch: Arguments) -> Pieces:
        """Of the two, where the samples of these arguments are, which are of one, the other or both."""
        first, second = (0, self.sizes[0]), (self.sizes[0], self.sizes[1])
        known = {
            id(self.twice): [first, first],
            id(self.one[0]): [first], id(self.other[0]): [second],
            id(self.whole[0]): [first, second], id(self.back[0]): [second, first],
        }  # fmt: skip
        return known[id(batch)]

    def swapped(self) -> "Question":
        """The second first."""
        sizes = self.sizes[1], self.sizes[0]
        return replace(self, one=self.other, other=self.one, whole=self.back, back=self.whole, sizes=sizes)


class Runs:
    """Runs of the step, each from where things stand now.

    Args:
        effects: What is asked for.
        function: The user's step.
        patches: The units' `forward`.
        quiet: Lets logs and metrics do nothing, and keeps random states.
        begin: Lets what the batch begins with be that of some arguments.
        aside: What else the step changes here, of values that this rank may not have: each run begins as the
            batch did.

    Attributes:
        anew: Labels of places in which another object stood after a run.
        observed: What the last run computed.
        listens: The LightningModule, where what runs log is to be known.
        told: What the last run logged then.
    """

    def __init__(
        self, effects: Sequence[Effect], function: Any, patches: UnitPatches, quiet: Any,
        begin: Callable[[Arguments], AbstractContextManager[None]], aside: Sequence[Effect] = (),
    ) -> None:  # fmt: skip
        self._aside = [(effect.place, Kept.of(effect.place.get(), deep=effect.deep)) for effect in aside]
        self._effects, self._function, self._patches, self._quiet = effects, function, patches, quiet
        self._start = {e.place.label: Kept.of(e.place.get(), deep=e.deep) for e in effects}
        self._begin = begin
        self.anew: set[str] = set()
        self.observed: Observed = []
        self.listens: nn.Module | None = None
        self.told: list[Tensor] = []
        self._known: set[int] = set()

    def start(self, effect: Effect) -> Any:
        """What stood there before."""
        return self.start_of(effect.place.label)

    def start_of(self, label: str) -> Any:
        """What stood in a place before."""
        kept = self._start[label]
        if held := kept.tensors or kept.beside:
            return held[0][1]
        return kept.inner[0][1] if kept.inner and kept.inner[0][0] is kept.value else kept.value

    def in_order(self, parts: Sequence[tuple[Arguments, Any]]) -> dict[str, Any]:
        """One after the other; nothing where these cannot follow each other, being of other sizes."""
        try:
            return self(parts)
        except Exception as error:
            _log.debug("micro-batches do not follow each other: %s", error)
            return dict.fromkeys(self._start, MISSING)

    def __call__(
        self, parts: Sequence[tuple[Arguments, Any]], seed: int = 0, carried: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        with ExitStack() as stack:
            stack.enter_context(self._quiet())
            if self.listens is not None:
                self.told = []
                names = [name for name in ("log", "log_dict") if hasattr(self.listens, name)]
                stack.enter_context(stub_sinks(self.listens, names, self._logged))
            stack.enter_context(self._begin(parts[0][0]))
            seed_torch(seed)
            self._known = {id(item) for value in (carried or {}).values() for item in _listed(value)}
            try:
                for effect in self._effects if carried else ():
                    if carried is not None and effect.place.label in carried:
                        _put(effect, _renewed(carried[effect.place.label]))
                for (args, kwargs), values in parts:
                    self._put_aside_back()
                    runner = values.again(self._patches.originals)
                    copied = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
                    with self._patches.run_by(runner):
                        result = self._function(*copied[0], **copied[1])
                    self.observed = [*runner.seen, (None, values_in(result))]
                return {effect.place.label: self._found(effect) for effect in self._effects}
            finally:
                for effect in self._effects:
                    self._start[effect.place.label].give_back(effect.place)
                self._put_aside_back()

    def _put_aside_back(self) -> None:
        for place, kept in self._aside:
            kept.give_back(place)

    def _logged(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        args, kwargs = given
        logged = [*args, kwargs.get("value"), kwargs.get("dictionary")]
        for value in [item for one in logged for item in (one.values() if isinstance(one, dict) else [one])]:
            if isinstance(value, int | float) or (isinstance(value, Tensor) and not is_placeholder(value)):
                self.told.append(torch.as_tensor(value, dtype=torch.float64).detach().clone())

    def _found(self, effect: Effect) -> Any:
        value = effect.place.get()
        start = self._start[effect.place.label]
        if not effect.deep and (value is not start.value or _is_refilled(value, start)):
            self.anew.add(effect.place.label)
        held = effect.deep or (value is start.value and start.is_written)
        if held and isinstance(value, Tensor) and not is_placeholder(value):
            return value.detach().clone()
        return own_containers(value, start.items() | self._known)


def _is_refilled(value: Any, start: Kept) -> bool:
    """Whether each item of a list or dictionary is another one than stood there, if any did."""
    if not start.inner or start.inner[0][0] is not value or not isinstance(value, list | dict) or not value:
        return False
    before = start.inner[0][1]
    if isinstance(value, list):
        return len(value) == len(before) and all(map(operator.is_not, value, before))
    return all(item is not before.get(key) for key, item in value.items())


def _renewed(value: Any) -> Any:
    """The same with containers of its own; items of lists stay what they are, to be known again."""
    if isinstance(value, dict):
        return dict_like(value, {key: _renewed(item) for key, item in value.items()})
    return value.copy() if isinstance(value, list | deque | set | dict) else value


def _listed(value: Any) -> Iterator[Any]:
    """Items of lists, and of lists in dictionaries."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _listed(item)
    elif isinstance(value, list | deque):
        yield from value


def _put(effect: Effect, value: Any) -> None:
    tensor = effect.place.get()
    if effect.deep and isinstance(tensor, Tensor) and isinstance(value, Tensor):
        set_values(tensor, value)
    else:
        effect.place.put(value)


def values_for(question: Question, seed: int) -> tuple[MadeUp, MadeUp, MadeUp]:
    """What units return for the two and, put together, for both."""
    generator = torch.Generator().manual_seed(seed)
    found: tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]] = ({}, {}, {})
    triples = zip(question.one[1].calls, question.other[1].calls, question.whole[1].calls, strict=True)
    for one, other, whole in triples:
        lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for leaf, specs in enumerate(zip(one.specs, other.specs, whole.specs, strict=True)):
            blocks = question.blocks.get((whole.unit, whole.nth, leaf), 1)
            first, second = made_up(specs[0], generator), made_up(specs[1], generator)
            lists[0].append(first)
            lists[1].append(second)
            lists[2].append(joined_values([first, second], specs[2], question.sizes, blocks))
        for call, tensors, table in zip((one, other, whole), lists, found, strict=True):
            specs_of = [spec.requires_grad for spec in call.specs]
            for tensor, needed in zip(tensors, specs_of, strict=True):
                tensor.requires_grad_(needed)
            table[call.unit, call.nth] = (tensors, call.structure)
    traces = question.one[1], question.other[1], question.whole[1]
    one_by, other_by, whole_by = (
        MadeUp(table, trace, question.really) for table, trace in zip(found, traces, strict=True)
    )
    return one_by, other_by, whole_by


def is_whole(one: Observed, other: Observed, whole: Observed, sizes: tuple[int, int]) -> bool:
    """Whether two micro-batches computed what both as one batch did: rows joined, means by samples."""
    if not len(one) == len(other) == len(whole):
        return False
    for (_, first), (_, second), (_, both) in zip(one, other, whole, strict=True):
        if not len(first) == len(second) == len(both):
            return False
        if not all(_joins(*tensors, sizes) for tensors in zip(first, second, both, strict=True)):
            return False
    return True


def _joins(one: Tensor, other: Tensor, whole: Tensor, sizes: tuple[int, int]) -> bool:
    spec = TensorSpec.of(whole)
    try:
        dimension = dimension_of([one, other], spec)
    except ValueError:
        return False
    times = 1 if dimension is None else max(one.shape[dimension] // sizes[0], 1)
    return any(
        _are_close(joined_values([one, other], spec, sizes, blocks), whole)
        for blocks in (n for n in range(1, times + 1) if times % n == 0)
    )


def _are_close(joined: Tensor, whole: Tensor) -> bool:
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        return False
    precise = joined.dtype in (torch.float64, torch.complex128)
    return bool(
        torch.allclose(joined, whole, rtol=1e-9 if precise else 1e-4, atol=1e-10 if precise else 1e-5)
    )
