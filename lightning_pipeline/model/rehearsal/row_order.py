"""In which order rows stand that are not one for each sample, such as those of joined views.

A step such as SimCLR's, `z = net(torch.cat([view, other_view]))`, has twice as many rows as samples: those of
all first views, then those of all other ones. A micro-batch has its own in this order, and so what units give
for the batch is not what they give for the micro-batches one after the other.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.cut import Microbatch, ValueKey
from lightning_pipeline.model.rehearsal.made_up_runs import AsOne, MadeUpRuns
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import LARGEST, MadeUp, Outputs, bytes_of, made_up_values
from lightning_pipeline.model.tensors import (
    TensorSpec,
    is_placeholder,
    map_tensors,
    sample_dimension,
    tensors_in,
)
from lightning_pipeline.model.trace import Trace

_log = logging.getLogger(__name__)


class RowOrder:
    """Finds it, by two runs for the batch: in one of them a micro-batch has samples of others.

    Units answer row by row: what differs then is the micro-batch's.

    Args:
        runs: Makes runs of a step.
    """

    def __init__(self, runs: MadeUpRuns) -> None:
        self._runs = runs
        self._tried: set[tuple[str, tuple[int, ...]]] = set()

    def look(
        self, step: Step, whole: Microbatch, sizes: Sequence[int], as_one: AsOne,
        outputs: Callable[[Microbatch], Outputs],
    ) -> None:  # fmt: skip
        """A batch begins: find the order, if it was not tried before, and write it into the step's trace.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
            as_one: Gives its trace as one, and what units return for it.
            outputs: Gives what units return for other arguments.
        """
        key = step.name, step.routes[-1].trace.path
        if key in self._tried:
            return
        self._tried.add(key)
        try:
            trace, of_whole = as_one(whole)
            dims = _dimensions(of_whole, outputs(step.microbatches[-1]))
            total = sum(sizes)
            several = [key for key, dim in dims.items() if _spec(of_whole, key).shape[dim] != total]
            traces = {id(one): one for one in (step.trace, trace)}.values()
            for known in traces:
                known.unordered.update(several)
            if several and bytes_of(of_whole) <= LARGEST:
                found = self._found(step, whole, sizes, trace, of_whole, dims)
                for known in traces:
                    known.blocks.update({key: found[key] for key in several if key in found})
                    known.unordered.difference_update(found)
        except Exception as error:  # the user's code, on made-up values
            _log.debug("the order of rows in %s cannot be tried: %s", step.name, error)

    def _found(
        self, step: Step, whole: Microbatch, sizes: Sequence[int], trace: Trace, outputs: Outputs,
        dims: Mapping[ValueKey, int],
    ) -> dict[ValueKey, int]:  # fmt: skip
        start, size, total = sum(sizes[:-1]), sizes[-1], sum(sizes)

        def run(batch: Microbatch) -> _RowByRow:
            runner = _RowByRow(outputs, dims, trace, self._runs.patches.originals)
            with self._runs.apart(step):  # each begins with what the batch does
                self._runs.run(step, batch, runner, torch.no_grad())
            return runner

        one, other = run(whole), run(_with_others(whole, step.microbatches[-1], start, size, total))
        found = {}
        for key, dim in dims.items():
            before = _blocks(one.given(key) != other.given(key), dim, start, size, total)
            if before is not None:
                found[key] = before
        return found


def _dimensions(whole: Outputs, part: Outputs) -> dict[ValueKey, int]:
    """Of the samples, for each output of a unit that has one."""
    found: dict[ValueKey, int] = {}
    for call, (_, specs) in whole.items():
        for leaf, pair in enumerate(zip(part[call][1], specs, strict=True)):
            dimension = sample_dimension(*pair)
            if dimension is not None and pair[1].dtype.is_floating_point:
                found[*call, leaf] = dimension
    return found


def _spec(outputs: Outputs, key: ValueKey) -> TensorSpec:
    unit, nth, leaf = key
    return outputs[unit, nth][1][leaf]


def _with_others(whole: Microbatch, part: Microbatch, start: int, size: int, total: int) -> Microbatch:
    """The batch, in which the samples of a micro-batch are the first ones again."""
    mine = list(tensors_in(part))
    places = iter(mine if len(mine) == len(list(tensors_in(whole))) else ())

    def exchanged(tensor: Tensor) -> Tensor:
        own = next(places, None)
        dimension = None if own is None else sample_dimension(TensorSpec.of(own), TensorSpec.of(tensor))
        if dimension is None or tensor.shape[dimension] != total:
            return tensor
        index = torch.arange(total, device=tensor.device)
        index[start:] = torch.arange(size, device=tensor.device) % max(start, 1)
        return tensor.index_select(dimension, index)

    exchanged_batch: Microbatch = map_tensors(exchanged, whole)
    return exchanged_batch


class _RowByRow(MadeUp):
    """Answers calls of units with made-up values, to each row of which what stands in the same row is added.

    Args:
        outputs: What units return for the batch.
        dims: Of the samples in them.
        trace: Of the step.
        originals: The units' own forwards.
    """

    def __init__(
        self, outputs: Outputs, dims: Mapping[ValueKey, int], trace: Trace, originals: Sequence[Any]
    ) -> None:
        self._made, self._dims = made_up_values(outputs), dims
        super().__init__(self._made, trace, frozenset(), originals, sees=False)

    def given(self, key: ValueKey) -> Tensor:
        """What a unit has given."""
        return self._made[key[:2]][0][key[2]]

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call."""
        nth = self._counts.get(unit, 0)
        tensors, structure = self._made[unit, nth]
        given = [one for one in tensors_in((args, kwargs)) if not is_placeholder(one)]
        added = [self._with_rows(tensor, (unit, nth, leaf), given) for leaf, tensor in enumerate(tensors)]
        self._made[unit, nth] = added, structure
        return super().call(unit, args, kwargs)

    def _with_rows(self, tensor: Tensor, key: ValueKey, given: Sequence[Tensor]) -> Tensor:
        dim = self._dims.get(key)
        if dim is None:
            return tensor
        length = tensor.shape[dim]
        rows = torch.zeros(length, dtype=torch.float64, device=tensor.device)
        for one in given:
            places = (dim, *range(one.dim()))  # of several, as where words are as many: its own
            of_rows = next((d for d in places if d < one.dim() and one.shape[d] == length), None)
            if of_rows is not None:
                rows += _number_of_each(one.detach(), of_rows)
        shape = [length if d == dim else 1 for d in range(tensor.dim())]
        return tensor + rows.reshape(shape).to(tensor.dtype)


def _number_of_each(tensor: Tensor, dim: int) -> Tensor:
    """One number for each row, made of all that is in it."""
    flat = torch.nan_to_num(tensor.to(torch.float64).movedim(dim, 0).reshape(tensor.shape[dim], -1))
    weights = torch.cos(torch.arange(flat.shape[1], dtype=torch.float64, device=flat.device))
    return torch.sin((flat * weights).sum(1))


def _blocks(differs: Tensor, dim: int, start: int, size: int, total: int) -> int | None:
    """How often all samples stand one after the other, if so a micro-batch's alone differ; else None."""
    rows = differs.movedim(dim, 0).reshape(differs.shape[dim], -1).any(1)
    times, rest = divmod(len(rows), total)
    for before in (one for one in range(1, times + 1) if not (rest or times % one)):
        of_samples = rows.reshape(before, total, times // before).any(2)
        if bool(of_samples[:, start : start + size].any()) and not bool(of_samples[:, :start].any()):
            return before
    return None
