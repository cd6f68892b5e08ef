"""What one device, DDP and FSDP would make of the same work."""

from dataclasses import dataclass
from functools import cached_property

from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.workload import PredictedMemory, Workload, alone


@dataclass(frozen=True)
class Rival:
    """Another way to use the devices.

    Attributes:
        step: Seconds of a step.
        memory: Bytes on each device.
    """

    step: float
    memory: float

    def fits(self, assumptions: Assumptions) -> bool:
        """Whether a device holds that."""
        return assumptions.memory is None or self.memory <= assumptions.memory


class Rivals:
    """The same micro-batches without a pipeline.

    Args:
        workload: For one micro-batch.
        sizes: Devices, and micro-batches of a step over all of them.
        assumptions: About the machine.
    """

    def __init__(self, workload: Workload, sizes: tuple[int, int], assumptions: Assumptions) -> None:
        self._workload, self._assumptions = workload, assumptions
        self._devices, self._number = sizes
        self._rounds = -(
            -self._number // self._devices
        )  # micro-batches that a device takes one after another
        self._times = workload.times(1, assumptions)

    @cached_property
    def alone(self) -> PredictedMemory:
        """What one device would hold."""
        return alone(self._workload.stages(1)[0], self._assumptions, self._workload.optimizer_states)

    @property
    def one_device(self) -> float:
        """Seconds of a step on one device."""
        return self._number * self._times.alone

    @property
    def ddp(self) -> float | None:
        """Seconds of a step with a replica on each device; `None` where there are fewer micro-batches.

        Gradients are averaged while the last backward goes on; what it does not hide comes on top.
        """
        if self._number < self._devices:
            return None
        exchange = self._assumptions.exchange(self.alone.gradients, self._devices)
        return self._rounds * self._times.alone + max(0.0, exchange - sum(self._times.backward))

    @property
    def fsdp(self) -> Rival | None:
        """All states shared out (`fully_shard`); `None` where there are fewer micro-batches than devices.

        Each micro-batch gathers the weights for its forward and for its backward and scatters the gradients,
        while layers compute. Beside its share a device holds the weights and gradients of two of the largest
        units.
        """
        if self._number < self._devices:
            return None
        held, states = self.alone, self._workload.stages(1)[0].states
        one_way = self._assumptions.exchange(1.0, self._devices) / 2
        forward = max(sum(self._times.forward), held.parameters * one_way)
        backward = max(sum(self._times.backward), (held.parameters + held.gradients) * one_way)
        unit = self._workload.largest_unit(states)
        memory = (
            (held.parameters + held.gradients + held.optimizer) / self._devices
            + held.buffers + held.activations + held.recomputed + 4 * unit
        )  # fmt: skip
        return Rival(self._rounds * (forward + backward), memory)
