"""Samples whose values of units a step mixes between its units, such as manifold mixup by `h[order]`.

A stage has one micro-batch at a time, so `h.flip(0)` there is another one than in the batch. Whether a step
does so is tried once: units answer with made-up values for the whole batch, and then with others for the
samples of one micro-batch. What a later unit is given for all other samples has to be the same.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.model.cut import Microbatch
from lightning_pipeline.model.rehearsal.made_up_runs import AsOne, MadeUpRuns
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import LARGEST, MadeUp, Outputs, bytes_of, made_up_values
from lightning_pipeline.model.tensors import is_placeholder, user_line
from lightning_pipeline.model.trace import Trace

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

    Attributes:
        lines: By step, at which line that is so, and by which function.
    """

    def __init__(self, runs: MadeUpRuns) -> None:
        self._runs = runs
        self._tried: set[tuple[str, tuple[int, ...]]] = set()
        self.lines: dict[str, dict[str, str]] = {}

    def look(self, step: Step, whole: Microbatch, sizes: Sequence[int], as_one: AsOne) -> None:
        """A batch begins: try it, if its trace leaves that open and it was not tried before.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
            as_one: Gives its trace as one, and what units return for it.
        """
        key = step.name, step.routes[0].trace.path
        if key in self._tried or not step.routes[0].trace.may_mix_values:
            return
        self._tried.add(key)
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

        def run(given: Mapping[Any, Any], sees: AbstractContextManager[Any]) -> MadeUp:
            runner = MadeUp(given, trace, frozenset(), self._runs.patches.originals)
            with self._runs.apart(step):  # each begins with what the batch does
                self._runs.run(step, whole, runner, torch.no_grad(), sees)
            return runner

        first = run(values, nullcontext())
        touched: list[set[int]] = []
        for start, size in _parts(sizes):
            others = _exchanged(values, start, size, total)
            found, shared = _reached(first, run(others, nullcontext()), start, size, total)
            if found:
                both = _Results(self._runs.root), _Results(self._runs.root)
                run(values, both[0]), run(others, both[1])
                return _line(*both, start, size, total)
            touched.append(shared)
        if len(touched) > 1 and set.intersection(*touched):
            return {"a unit that is given one value for all samples": "what it gives"}
        return {}


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First row and number of rows of the micro-batches to exchange."""
    numbers = range(len(sizes)) if len(sizes) <= _MOST else [*range(_MOST - 1), len(sizes) - 1]
    for number in numbers:
        yield sum(sizes[:number]), sizes[number]


def _exchanged(values: Mapping[Any, Any], start: int, size: int, total: int) -> dict[Any, Any]:
    """The same with others for the samples of a micro-batch."""

    def other(tensor: Tensor) -> Tensor:
        dimension = next((d for d, length in enumerate(tensor.shape) if length == total), None)
        if dimension is None or not tensor.is_floating_point():
            return tensor
        made = tensor.clone()
        rows = made.narrow(dimension, start, size)
        rows.copy_(1.5 - 2 * rows)
        return made

    return {
        call: ([other(one) for one in tensors], structure) for call, (tensors, structure) in values.items()
    }


def _reached(first: MadeUp, other: MadeUp, start: int, size: int, total: int) -> tuple[bool, set[int]]:
    """Whether other samples differ somewhere, and the calls of units that are given one value for all."""
    if [unit for unit, _ in first.seen] != [unit for unit, _ in other.seen]:
        return False, set()  # it went elsewhere, which says nothing
    shared = set()
    for place, ((_, before), (_, after)) in enumerate(zip(first.seen, other.seen, strict=True)):
        for pair in zip(before, after, strict=False):
            kind = _kind(*pair, start, size, total)
            if kind == "others":
                return True, set()
            if kind == "all":
                shared.add(place)
    return False, shared


def _kind(before: Tensor, after: Tensor, start: int, size: int, total: int) -> str:
    """What differs: "" for nothing or the micro-batch alone, "others", "all" of what has no samples."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return ""
    differs = ~torch.isclose(before, after, rtol=1e-5, atol=0.0, equal_nan=True)
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
