"""A module and one of its micro-batches, cut into any number of stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import enable_grad, nn

from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.workload.optimizer_states import optimizer_states
from lightning_pipeline.forecast.workload.profile import StageProfile, State, profile
from lightning_pipeline.forecast.workload.rates import tokens_of
from lightning_pipeline.forecast.workload.times import StageTimes, estimated
from lightning_pipeline.model.cut import (
    Partition,
    StageActivations,
    StageTable,
    opened,
    partition,
    stage_activations,
)
from lightning_pipeline.model.trace import Trace, Unit, find_units, trace_step


class Workload:
    """What is to be spread over stages. Traces are made when first needed, and kept.

    Args:
        root: The module, with its weights or on the meta device.
        args: Arguments of `training_step` for one micro-batch.
        how: Where to cut, as of `partition`; names count for `named_stages` only.
        units: Name patterns of modules to keep whole.
        forward_context: Makes the precision's context.
        configure: Gives the module's optimizers. Default: its `configure_optimizers`.
    """

    def __init__(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        *,
        how: str | Sequence[str] = "auto",
        units: Sequence[str] | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        configure: Callable[[], Any] | None = None,
    ) -> None:
        self.root, self.args, self.forward_context = root, args, forward_context
        self._how, self._units, self._configure = how, units, configure
        self._traces: dict[tuple[str, ...], Trace] = {}
        self._cuts: dict[int, Partition] = {}
        self._profiles: dict[int, tuple[StageProfile, ...]] = {}
        self._times: dict[tuple[int, Assumptions], StageTimes] = {}
        self._states: dict[str, float] | None = None
        self._looked_for_states = False
        self._measured: dict[int, dict[tuple[int, str], list[float]]] = {}

    def partition(self, num_stages: int) -> Partition:
        """The cut that a run with so many stages would have.

        Raises:
            SplitError: The step cannot be cut.
            PartitionError: The stages are not possible.
        """
        if num_stages not in self._cuts:
            named = not isinstance(self._how, str)
            how = "auto" if named and len(self._how) + 1 != num_stages else self._how
            self._cuts[num_stages] = partition(self._trace(num_stages), num_stages, how=how)
        return self._cuts[num_stages]

    def _trace(self, num_stages: int) -> Trace:
        units = find_units(self.root, at_least=num_stages, keep_whole=self._units)
        return opened(units, num_stages, self._traced)

    def _traced(self, units: list[Unit]) -> Trace:
        key = tuple(unit.name for unit in units)
        if key not in self._traces:
            with enable_grad():
                self._traces[key] = trace_step(
                    self.root, "training_step", self.args, units=units, forward_context=self.forward_context
                )
        return self._traces[key]

    def stages(self, num_stages: int) -> tuple[StageProfile, ...]:
        """What each stage of that cut holds and computes."""
        if num_stages not in self._profiles:
            self._profiles[num_stages] = profile(self.root, self.partition(num_stages))
        return self._profiles[num_stages]

    def held(self, num_stages: int, rank_of: Sequence[int]) -> list[StageActivations]:
        """What the stages hold for a micro-batch, on these ranks."""
        return stage_activations(self.partition(num_stages), rank_of)

    def like(self, cut: Partition) -> Partition:
        """A cut of another workload of this module, with this one's trace."""
        return replace(cut, trace=self._trace(cut.num_stages))

    @property
    def num_units(self) -> int:
        """Units that a cut into one stage finds: more stages take them apart further, and another trace."""
        return len(self._trace(1).units)

    def times(self, num_stages: int, assumptions: Assumptions) -> StageTimes:
        """How long each stage takes."""
        key = num_stages, assumptions
        if key not in self._times:
            self._times[key] = estimated(self.stages(num_stages), assumptions)
        return self._times[key]

    def table(self, num_stages: int, assumptions: Assumptions) -> StageTable:
        """That cut, with each stage's share of the time."""
        table, times = self.partition(num_stages).table(), self.times(num_stages, assumptions)
        rows = [
            replace(row, cost_share=(forward + backward) / (times.alone or 1.0))
            for row, forward, backward in zip(table.rows, times.forward, times.backward, strict=True)
        ]
        return replace(table, rows=tuple(rows))

    @property
    def optimizer_states(self) -> dict[str, float] | None:
        """Bytes that the module's own optimizer keeps, by trained parameter; `None` where that is unknown."""
        if not self._looked_for_states:
            self._looked_for_states = True
            self._states = optimizer_states(self.root, self._configure)
        return self._states

    def largest_unit(self, states: Sequence[State]) -> int:
        """Bytes of the parameters of the largest unit.

        Args:
            states: All of the module.
        """
        sizes: dict[str, int] = {unit.name: 0 for unit in self._trace(1).units}
        for state in states:
            if state.is_parameter:
                for name in _prefixes(state.name):
                    if name in sizes:
                        sizes[name] += state.num_bytes
        return max(sizes.values(), default=0)

    @property
    def tokens(self) -> int | None:
        """Of the micro-batch; `None` where it does not tell."""
        return tokens_of(self.args[0]) or None

    @property
    def measured_on(self) -> str:
        """What the times were measured on; empty where they are estimated."""
        return ""

    @property
    def name(self) -> str:
        """What the module is called."""
        return type(self.root).__name__


def _prefixes(name: str) -> Iterator[str]:
    """Of a dotted name, the modules that it lies in."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])
