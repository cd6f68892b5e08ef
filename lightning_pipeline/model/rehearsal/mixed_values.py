"""Samples whose values of units a step mixes between its units, such as manifold mixup by `h[order]`.

A stage has one micro-batch at a time, so `h.flip(0)` there is another one than in the batch. Whether a step
does so is tried once: units answer with made-up values for the whole batch, and then with others for the
samples of one micro-batch. What a later unit is given for all other samples has to be the same.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.model.cut import Microbatch, TracedOutputs
from lightning_pipeline.model.rehearsal.made_up_runs import AsOne, MadeUpRuns
from lightning_pipeline.model.rehearsal.padding import Padding
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import LARGEST, MadeUp, Outputs, bytes_of, made_up_values
from lightning_pipeline.model.state import values_kept
from lightning_pipeline.model.tensors import is_placeholder, map_tensors, tensors_in, user_line
from lightning_pipeline.model.trace import Trace
from lightning_pipeline.registry import parameters_of

_log = logging.getLogger(__name__)
_MOST = 8  # micro-batches whose values are exchanged


class _Results(TorchFunctionMode):
    """Keeps what functions between units give, with their lines.

    Args:
        root: The LightningModule.
        inside: Whether a unit runs.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = root
        self.found: list[tuple[str, str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not is_placeholder(result):
            name = str(getattr(func, "__name__", "a function")).strip("_")
            self.found.append((name, user_line(self._root), result.detach().clone()))
        return result


class MixedValues:
    """Tries whether what units are given follows from what units gave for samples of other micro-batches.

    Args:
        runs: Makes runs of a step.
        outputs: Gives what units return for a micro-batch, on a way and with its random numbers.
        stage_of: The stage of each unit.
        stages: Those of this rank.

    Attributes:
        lines: By step, at which line that is so, and by which function.
        padding: Tries whether padding counts that micro-batches do not have.
    """

    def __init__(
        self, runs: MadeUpRuns, outputs: Callable[..., TracedOutputs], stage_of: Sequence[int],
        stages: Collection[int],
    ) -> None:  # fmt: skip
        self._runs, self._outputs = runs, outputs
        self.padding = Padding(runs, outputs, stage_of, stages)
        self._tried: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        self.lines: dict[str, dict[str, str]] = {}

    def look(self, step: Step, whole: Microbatch, sizes: Sequence[int], as_one: AsOne) -> None:
        """A batch begins: try it, if its trace leaves that open and it was not tried before.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
            as_one: Gives its trace as one, and what units return for it.
        """
        tried = self._tried.setdefault((step.name, step.routes[0].trace.path), set())
        ways = len(step.ways.called)  # another batch may call other functions between the same units
        if ways in tried or len(tried) == _MOST or not step.routes[0].trace.may_mix_values:
            return
        tried.add(ways)
        try:
            trace, outputs = as_one(whole)
            found = self._mixed(step, whole, sizes, trace, outputs)
            self.lines[step.name] = self.lines.get(step.name, {}) | found
        except Exception as error:  # the user's code, on made-up values
            _log.debug("whether %s mixes what units give cannot be tried: %s", step.name, error)

    def _mixed(
        self, step: Step, whole: Microbatch, sizes: Sequence[int], trace: Trace, outputs: Outputs
    ) -> dict[str, str]:
        if bytes_of(outputs) > LARGEST:
            return {}
        total, values = sum(sizes), made_up_values(outputs)
        own = self._outputs(step.routes[0], step.microbatches[0], partial(step.seeds.microbatch, 0))
        along = _samples_of(outputs, own, total, sizes[0])

        def run(given: Mapping[Any, Any], sees: AbstractContextManager[Any]) -> MadeUp:
            runner = MadeUp(given, trace, frozenset(), self._runs.patches.originals)
            with self._runs.apart(step):  # each begins with what the batch does
                self._runs.run(step, whole, runner, torch.no_grad(), sees)
            return runner

        first = run(values, nullcontext())
        reached: list[dict[_Place, _Touched]] = []
        for start, size in _parts(sizes):
            others = _exchanged(values, along, start, size)
            reached.append(_reached(first, run(others, nullcontext()), start, size, total))
        for (start, size), touched in zip(_parts(sizes), reached, strict=True):
            mixed = [place for place, one in touched.items() if one.is_of_others]
            if any(not _are_picked(place, reached) for place in mixed):
                both = _Results(self._runs.root), _Results(self._runs.root)
                run(values, both[0]), run(_exchanged(values, along, start, size), both[1])
                return _line(*both, start, size, total)
        rows = [{(place, row) for place, one in parts.items() for row in one.rows} for parts in reached]
        shared = set.intersection(*rows) if len(rows) > 1 else set()
        units = {unit for (call, _), _ in shared if (unit := first.seen[call][0]) is not None}
        if shared and not self._are_means(step, whole, sizes, trace, values, along, units):
            return {"a unit that is given one value for all samples": "what it gives"}
        return {}

    def _are_means(
        self, step: Step, whole: Microbatch, sizes: Sequence[int], trace: Trace,
        values: Mapping[Any, Any], along: Mapping[Any, Any], units: Collection[int],
    ) -> bool:  # fmt: skip
        """Whether units that are given one value for all samples give means by samples.

        Such as losses of tasks that a module with weights of its own adds up.
        """
        modules = [self._runs.patches.units[unit].module for unit in units]
        if any(is_placeholder(one) for module in modules for one in parameters_of(module)):
            return False
        shares = [size / sum(sizes) for size in sizes]
        for given in (values, _exchanged(values, along, 0, sum(sizes))):
            with self._runs.apart(step), values_kept(modules), torch.no_grad():
                batch = self._given_by(step, whole, units, given, trace)
                parts = []
                for number, (start, size) in enumerate(_parts(sizes)):
                    cut = _cut(given, along, start, size)
                    route, arguments = step.routes[number], step.microbatches[number]
                    parts.append(self._given_by(step, arguments, units, cut, route.trace))
            for one, several in zip(batch, zip(*parts, strict=True), strict=True):
                mean = sum(share * part for share, part in zip(shares, several, strict=True))
                if one.dim() or not bool(_are_close(one, torch.as_tensor(mean))):
                    return False
        return len(shares) <= _MOST

    def _given_by(
        self, step: Step, batch: Microbatch, units: Collection[int], values: Mapping[Any, Any], trace: Trace
    ) -> list[Tensor]:
        """What units give when they are called as in a run of the step."""
        runner = _Called(values, trace, self._runs.patches.originals, units)
        self._runs.run(step, batch, runner)
        return [tensor.double() for tensor in runner.given]


class _Called(MadeUp):
    """Runs some units, too, and keeps what they give.

    Args:
        values: For each call of a unit, tensors and the structure that they are put into.
        trace: Of the step.
        originals: The units' own forwards.
        units: Those that run.

    Attributes:
        given: Tensors that they have given, in order.
    """

    def __init__(
        self, values: Mapping[Any, Any], trace: Trace, originals: Sequence[Any], units: Collection[int]
    ) -> None:
        super().__init__(values, trace, frozenset(), originals, sees=False)
        self._units = units
        self.given: list[Tensor] = []

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call."""
        if unit in self._units and not self.inside:
            self.inside = True
            try:
                copies = map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs))
                self.given += tensors_in(self._originals[unit](*copies[0], **copies[1]))
            finally:
                self.inside = False
        return super().call(unit, args, kwargs)


def _cut(values: Mapping[Any, Any], along: Mapping[Any, Any], start: int, size: int) -> dict[Any, Any]:
    """Values of a micro-batch."""

    def cut(tensor: Tensor, dimension: int | None) -> Tensor:
        return tensor if dimension is None else tensor.narrow(dimension, start, size)

    return {
        call: ([cut(*one) for one in zip(tensors, along[call], strict=True)], structure)
        for call, (tensors, structure) in values.items()
    }


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First row and number of rows of the micro-batches to exchange."""
    numbers = range(len(sizes)) if len(sizes) <= _MOST else [*range(_MOST - 1), len(sizes) - 1]
    for number in numbers:
        yield sum(sizes[:number]), sizes[number]


def _samples_of(outputs: Outputs, own: Outputs, total: int, size: int) -> dict[Any, list[int | None]]:
    """The dimension of samples of each tensor that a call returns: it is shorter for a micro-batch."""
    found = {}
    for call, (_, specs) in outputs.items():
        parts = [one.shape for one in own[call][1]] if call in own else [()] * len(specs)
        found[call] = [
            _dimension(spec.shape, part, (total, size)) for spec, part in zip(specs, parts, strict=False)
        ]
    return found


def _dimension(whole: Sequence[int], part: Sequence[int], sizes: tuple[int, int]) -> int | None:
    """The first that has these sizes."""
    pairs = enumerate(zip(whole, part, strict=False))
    return next((dimension for dimension, pair in pairs if pair == sizes), None)


def _exchanged(values: Mapping[Any, Any], along: Mapping[Any, Any], start: int, size: int) -> dict[Any, Any]:
    """The same with others for the samples of a micro-batch."""

    def other(tensor: Tensor, dimension: int | None) -> Tensor:
        if dimension is None or not tensor.is_floating_point():
            return tensor
        made = tensor.clone()
        rows = made.narrow(dimension, start, size)
        rows.copy_(1.5 - 2 * rows)
        return made

    return {
        call: ([other(*one) for one in zip(tensors, along[call], strict=True)], structure)
        for call, (tensors, structure) in values.items()
    }


_Place = tuple[int, int]
"""A call of a unit, and which of the tensors that it is given."""


class _Touched(NamedTuple):
    """What follows from the samples of a micro-batch in what a unit is given, elsewhere than in their rows.

    Attributes:
        is_of_others: Whether it has rows for all samples, so that it is in those of others.
        rows: Those that differ, by their numbers.
        is_whole: Whether it has one row for each sample of the batch.
    """

    is_of_others: bool
    rows: list[int]
    is_whole: bool


def _reached(first: MadeUp, other: MadeUp, start: int, size: int, total: int) -> dict[_Place, _Touched]:
    """Where that is so."""
    if [unit for unit, _ in first.seen] != [unit for unit, _ in other.seen]:
        return {}  # it went elsewhere, which says nothing
    found = {}
    for call, ((_, before), (_, after)) in enumerate(zip(first.seen, other.seen, strict=True)):
        for place, pair in enumerate(zip(before, after, strict=False)):
            kind = _kind(*pair, start, size, total)
            if kind:
                rows = (~_are_close(*pair)).flatten(1).any(1) if pair[0].dim() > 1 else ~_are_close(*pair)
                numbers = rows.reshape(-1).nonzero().flatten().tolist()
                found[call, place] = _Touched(kind == "others", numbers, pair[0].shape[:1] == (total,))
    return found


def _are_picked(place: _Place, reached: Sequence[Mapping[_Place, _Touched]]) -> bool:
    """Whether each micro-batch has rows of its own there, one after the other, as `h[mask]` has.

    Those are no rows of all samples, even if there are by chance a multiple of them.
    """
    touched = [one[place] for one in reached if place in one]
    before, after = touched[:-1], touched[1:]
    in_order = all(one.rows[-1] < two.rows[0] for one, two in zip(before, after, strict=True))
    return in_order and not any(one.is_whole for one in touched)


def _are_close(before: Tensor, after: Tensor) -> Tensor:
    return torch.isclose(before, after, rtol=1e-5, atol=0.0, equal_nan=True)


def _kind(before: Tensor, after: Tensor, start: int, size: int, total: int) -> str:
    """What differs: "" for nothing or the micro-batch alone, "others", "all" of what has no samples."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return ""
    differs = ~_are_close(before, after)
    if not bool(differs.any()):
        return ""
    many = [dim for dim, length in enumerate(differs.shape) if length and length % total == 0]
    if not many:
        return "all"
    return "" if any(_is_of_part(differs, dim, start, size, total) for dim in many) else "others"


def _is_of_part(differs: Tensor, dim: int, start: int, size: int, total: int) -> bool:
    """Whether nothing but a micro-batch differs along a dimension that has each sample once or more often."""
    flat = differs.movedim(dim, 0).flatten(1).any(1) if differs.dim() > 1 else differs
    times = len(flat) // total
    for before in (one for one in range(1, times + 1) if times % one == 0):
        rows = flat.reshape(before, total, times // before).any(2).any(0)
        if not bool(rows[:start].any() or rows[start + size :].any()):
            return True
    return False


def _line(first: _Results, other: _Results, start: int, size: int, total: int) -> dict[str, str]:
    """Where a function first gives what follows from samples of another micro-batch."""
    for (name, line, before), (same, _, after) in zip(first.found, other.found, strict=False):
        if name != same:
            break
        if _kind(before, after, start, size, total) == "others":
            return {line: name}
    return {"what a unit is given": "a function"}
