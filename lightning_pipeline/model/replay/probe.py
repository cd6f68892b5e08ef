"""Find out how what micro-batches leave behind is put together: run the code between the units and look.

The units answer with made-up values, so that nothing is computed but glue. The step runs with one
micro-batch, with another, with one after the other, and with both joined to one batch. A rule that makes of
the first two what the last has left is the rule.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.state import (
    CHAINED,
    Merge,
    Rule,
    Trial,
    equal,
    own_containers,
    rule_for,
    unmerged,
    usual,
)
from lightning_pipeline.model.tensors import Given, TensorSpec, alias, is_placeholder, map_tensors
from lightning_pipeline.model.trace import Effect, Kept, Trace, UnitPatches, Watch, tensors_held

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
    """

    one: tuple[Arguments, Trace]
    other: tuple[Arguments, Trace]
    whole: tuple[Arguments, Trace]
    back: tuple[Arguments, Trace]
    sizes: tuple[int, int]

    def swapped(self) -> "Question":
        """The second first."""
        return Question(self.other, self.one, self.back, self.whole, (self.sizes[1], self.sizes[0]))


class _MadeUp:
    """Answers calls of units with values that nobody computed."""

    inside = False

    def __init__(self, values: Mapping[tuple[int, int], Any], trace: Trace) -> None:
        self._values, self._trace = values, trace
        self._counts: dict[int, int] = {}
        self._modules = list(trace.root.modules())

    def again(self) -> "_MadeUp":
        """The same, for another run."""
        return _MadeUp(self._values, self._trace)

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nth = self._counts.get(unit, 0)
        self._counts[unit] = nth + 1
        tensors, structure = self._values[unit, nth]
        fresh = [alias(t.clone().requires_grad_()) if t.requires_grad else t.clone() for t in tensors]
        given, ports = Given(args, kwargs), self._trace.ports.get((unit, nth))
        if ports is None:
            return given.put_together(fresh, structure)
        watch = Watch(self._modules, self._trace.units[unit].module, ports, given)
        result = watch.put_together(fresh, structure)
        for hook in watch.put_off(fresh, structure):
            hook()
        return result


def rules_of(
    effects: Sequence[Effect],
    question: Question,
    function: Callable[..., Any],
    patches: UnitPatches,
    merge: Merge,
    quiet: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Rule | None]:
    """The rule for each place; `CHAINED` where micro-batches have to follow each other.

    Args:
        effects: Of the step.
        question: What to run.
        function: The user's step.
        patches: The units' `forward`.
        merge: Merges one value per micro-batch.
        quiet: Lets logs and metrics do nothing, and keeps random states.

    Raises:
        Exception: Whatever the step raises on made-up values.
    """
    run = _Runs(effects, function, patches, quiet)
    trials, again = _trials(run, question)
    found: dict[str, Rule | None] = {}
    for effect in effects:
        label = effect.place.label
        own = [Trial(a[label], b[label], c[label], d[label], sizes) for (a, b, c, d), sizes in trials]
        if equal(own[0].whole, again[label]) and all(_is_finite(trial[:4]) for trial in own):
            found[label] = rule_for(run.start(effect), own, merge, anew=label in run.anew)
        else:  # random, or no numbers at all
            found[label] = unmerged if effect.deep else usual
    in_order = {
        label
        for label in found
        if all(equal(after[label], whole[label]) for (_, _, after, whole), _ in trials)
    }
    if any(found[label] is None and label in in_order for label in found):
        return {label: CHAINED if label in in_order else rule or unmerged for label, rule in found.items()}
    return {label: rule or unmerged for label, rule in found.items()}


def _trials(run: "_Runs", question: Question) -> tuple[list[Any], dict[str, Any]]:
    """What is left with these values and, in the other order, with others; and once more with other draws."""
    trials = []
    for seed, asked in enumerate((question, question.swapped())):
        one, other, whole = _values_for(asked, seed)
        first, second = (asked.one[0], one), (asked.other[0], other)
        runs = [first], [second], [first, second], [(asked.whole[0], whole)]
        trials.append((tuple(run(parts) for parts in runs), asked.sizes))
        if not seed:
            again = run(runs[-1], seed=1)
    return trials, again


class _Runs:
    """Runs of the step, each from where things stand now."""

    def __init__(self, effects: Sequence[Effect], function: Any, patches: UnitPatches, quiet: Any) -> None:
        self._effects, self._function, self._patches, self._quiet = effects, function, patches, quiet
        self._start = {e.place.label: Kept.of(e.place.get(), deep=e.deep) for e in effects}
        self.anew: set[str] = set()

    def start(self, effect: Effect) -> Any:
        kept = self._start[effect.place.label]
        if kept.tensors:
            return kept.tensors[0][1]
        return kept.inner[0][1] if kept.inner and kept.inner[0][0] is kept.value else kept.value

    def __call__(self, parts: Sequence[tuple[Arguments, Any]], seed: int = 0) -> dict[str, Any]:
        with ExitStack() as stack:
            stack.enter_context(self._quiet())
            torch.manual_seed(seed)
            try:
                for (args, kwargs), values in parts:
                    self._patches.runner = values.again()
                    copied = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
                    self._function(*copied[0], **copied[1])
                return {effect.place.label: self._found(effect) for effect in self._effects}
            finally:
                self._patches.runner = None
                for effect in self._effects:
                    self._start[effect.place.label].give_back(effect.place)

    def _found(self, effect: Effect) -> Any:
        value = effect.place.get()
        if value is not self._start[effect.place.label].value and not effect.deep:
            self.anew.add(effect.place.label)
        if effect.deep and isinstance(value, Tensor) and not is_placeholder(value):
            return value.detach().clone()
        known = {
            id(item)
            for _, saved in self._start[effect.place.label].inner
            for item in (saved.values() if isinstance(saved, dict) else saved)
        }
        return own_containers(value, known)


def _values_for(question: Question, seed: int) -> "tuple[_MadeUp, _MadeUp, _MadeUp]":
    """What units return for the two and, put together, for both."""
    generator = torch.Generator().manual_seed(seed)
    found: tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]] = ({}, {}, {})
    triples = zip(question.one[1].calls, question.other[1].calls, question.whole[1].calls, strict=True)
    for one, other, whole in triples:
        lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for specs in zip(one.specs, other.specs, whole.specs, strict=True):
            first, second = _made_up(specs[0], generator), _made_up(specs[1], generator)
            lists[0].append(first)
            lists[1].append(second)
            lists[2].append(_together(first, second, specs[2], question.sizes))
        for call, tensors, table in zip((one, other, whole), lists, found, strict=True):
            specs_of = [spec.requires_grad for spec in call.specs]
            for tensor, needed in zip(tensors, specs_of, strict=True):
                tensor.requires_grad_(needed)
            table[call.unit, call.nth] = (tensors, call.structure)
    traces = question.one[1], question.other[1], question.whole[1]
    one_by, other_by, whole_by = map(_MadeUp, found, traces)
    return one_by, other_by, whole_by


def _made_up(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return (
            torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(spec.dtype).to(spec.device)
        )
    return torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype).to(spec.device)


def _together(one: Tensor, other: Tensor, spec: TensorSpec, sizes: tuple[int, int]) -> Tensor:
    """Along the dimension that has grown; a number is the mean over samples, as a loss is."""
    if tuple(one.shape) == tuple(other.shape) == spec.shape:
        if one.is_floating_point():
            return (one * sizes[0] + other * sizes[1]) / sum(sizes)
        return one
    grown = [d for d, size in enumerate(spec.shape) if size == one.shape[d] + other.shape[d]]
    if len(grown) != 1:
        raise ValueError("no dimension is that of the samples")
    return torch.cat([one, other], grown[0])


def _is_finite(values: Sequence[Any]) -> bool:
    return all(
        bool(torch.isfinite(tensor).all())
        for value in values
        for tensor in tensors_held(value)
        if tensor.is_floating_point() and not is_placeholder(tensor)
    )
