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
            tensor = module._buffers.get(name)
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
        """Those modules whose buffers two runs leave the same."""
        try:
            runs = []
            for seed, batch in enumerate(batches):
                trace, outputs = as_one(batch)
                given = map_tensors(_another, batch) if seed else batch
                runner = self._made_up(outputs, trace, written, seed)
                with self._runs.apart(step):
                    self._runs.run(step, given, runner, seed=seed)
                    runs.append([_values(one) for one in written])
        except Exception as error:  # the user's code, on made-up values
            _log.debug("what units of %s write cannot be tried: %s", step.name, error)
            return []
        return [one for one, *both in zip(written, *runs, strict=True) if _is_same(*both)]

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


def _values(one: _Written) -> list[Tensor]:
    return [one.module._buffers[name].detach().clone() for name in one.names]  # type: ignore[union-attr]


def _is_same(first: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(
        one.shape == two.shape and torch.equal(one, two) for one, two in zip(first, other, strict=True)
    )
