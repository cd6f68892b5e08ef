"""Which buffers of units change in a forward without regard to what the unit is given.

The power iteration of a spectral norm goes by the weight alone, and a count of forwards by nothing; running
statistics go by the samples. Which is which is found by running the unit on two batches of made-up values, of
different sizes and with different random numbers: what comes out the same does not follow from them.
"""

import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import AnyBatchNorm
from lightning_pipeline.model.cut import Microbatch
from lightning_pipeline.model.rehearsal.made_up_runs import AsOne, MadeUpRuns
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import MadeUp, Outputs, made_up
from lightning_pipeline.model.state import BufferStarts
from lightning_pipeline.model.tensors import is_placeholder, map_tensors
from lightning_pipeline.model.trace import Trace

_log = logging.getLogger(__name__)


class _Written(NamedTuple):
    """A module in a unit of this rank, some buffers of which the forward changes.

    Attributes:
        unit: The number of the unit.
        module: It.
        names: Of the buffers.
    """

    unit: int
    module: nn.Module
    names: list[str]


class UnitBuffers:
    """Finds them, on the rank that has the unit.

    Args:
        runs: Makes runs of a step.
        stage_of: The stage of each unit.
        stages: Those of this rank.
    """

    def __init__(self, runs: MadeUpRuns, stage_of: Sequence[int], stages: Collection[int]) -> None:
        self._runs, self._stage_of, self._stages = runs, stage_of, stages
        self._known: dict[tuple[str, frozenset[int]], list[_Written]] = {}

    def starts(
        self, step: Step, trace: Trace, whole: Microbatch | None,
        as_one: AsOne,
    ) -> dict[int, BufferStarts]:  # fmt: skip
        """A batch begins: what each stage of this rank, by its number, is to begin its micro-batches with.

        Args:
            step: The batch.
            trace: Of the step.
            whole: Its arguments as one, where they are known.
            as_one: Gives the trace of arguments, and what units return for them.
        """
        if whole is None or len(step.microbatches) == 1:
            return {}
        written = self._written(trace)
        if not written:
            return {}
        key = step.name, frozenset(id(one.module) for one in written)
        if key not in self._known:
            self._known[key] = self._alike(step, written, (step.microbatches[0], whole), as_one)
        held: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for one in self._known[key]:
            buffers = [(one.module._buffers, name) for name in one.names]
            held.setdefault(self._stage_of[one.unit], []).extend(buffers)
        return {stage: BufferStarts(buffers) for stage, buffers in held.items()}

    def _written(self, trace: Trace) -> list[_Written]:
        """Modules in units of this rank that write buffers, but for batch norms."""
        found: dict[int, _Written] = {}

        def note(unit: int, module: nn.Module, name: str) -> None:
            is_here = self._stage_of[unit] in self._stages and not isinstance(module, AnyBatchNorm)
            tensor = dict(module._buffers).get(name)  # those of a scripted module have no `get`
            if is_here and isinstance(tensor, Tensor) and not is_placeholder(tensor):
                names = found.setdefault(id(module), _Written(unit, module, [])).names
                names += [name] if name not in names else []

        for path in sorted(trace.buffers_written):
            owner, _, name = path.rpartition(".")
            if path in trace.state_units:
                note(trace.state_units[path], self._runs.root.get_submodule(owner), name)
        for unit, place in trace.unit_attributes:
            for part in trace.units[unit].module.modules():
                if place.owner.identity == id(part._buffers):
                    note(unit, part, str(place.key))
        return list(found.values())

    def _alike(
        self, step: Step, written: Sequence[_Written], batches: Sequence[Microbatch],
        as_one: AsOne,
    ) -> list[_Written]:  # fmt: skip
        """Of these modules the buffers that two runs leave the same, and that no other buffer goes by."""

        def run(seed: int, batch: Microbatch, moved: Sequence[_Written] = ()) -> list[dict[str, Tensor]]:
            trace, outputs = as_one(batch)
            given = map_tensors(_another, batch) if seed else batch
            runner = self._made_up(outputs, trace, written, seed)
            with self._runs.apart(step):
                for one in moved:
                    _move(one)
                self._runs.run(step, given, runner, seed=seed)
                return [_values(one) for one in written]

        try:
            first, second = (run(seed, batch) for seed, batch in enumerate(batches))
            alike = [
                one._replace(names=[name for name in one.names if _is_same(mine[name], theirs[name])])
                for one, mine, theirs in zip(written, first, second, strict=True)
            ]
            several = [
                one
                for one, every in zip(alike, written, strict=True)
                if 0 < len(one.names) < len(every.names)
            ]
            moved = run(0, batches[0], several) if several else first
        except Exception as error:  # the user's code, on made-up values
            _log.debug("what units of %s write cannot be tried: %s", step.name, error)
            return []
        return [
            one
            for one, before, after in zip(alike, first, moved, strict=True)
            if one.names and all(_is_same(before[name], after[name]) for name in before.keys() - one.names)
        ]

    def _made_up(self, outputs: Outputs, trace: Trace, written: Sequence[_Written], seed: int) -> MadeUp:
        generator = torch.Generator().manual_seed(seed)
        values = {
            call: ([made_up(spec, generator).requires_grad_(spec.requires_grad) for spec in specs], structure)
            for call, (structure, specs) in outputs.items()
        }
        really = frozenset(one.unit for one in written)
        return MadeUp(values, trace, really, self._runs.patches.originals, sees=False)


def _another(tensor: Tensor) -> Tensor:
    """Other values of the same kind."""
    return tensor * 0.5 + 0.25 if tensor.is_floating_point() else tensor.clone()


def _values(one: _Written) -> dict[str, Tensor]:
    return {name: one.module._buffers[name].detach().clone() for name in one.names}  # type: ignore[union-attr]


def _move(one: _Written) -> None:
    """Let buffers begin with something else, to see what goes by them."""
    for name in one.names:
        tensor = one.module._buffers[name]
        assert tensor is not None, "it was written"
        moved = ~tensor if tensor.dtype == torch.bool else tensor * 2 + 3
        one.module._buffers[name] = moved.detach().to(tensor.dtype)


def _is_same(first: Tensor, other: Tensor) -> bool:
    return first.shape == other.shape and torch.equal(first, other)
