"""Whether a pipeline pays at all, in one sentence: what one device, DDP and FSDP make of the same work."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.predict import Prediction
from lightning_pipeline.forecast.workload import PredictedMemory, Workload, alone, seconds_text
from lightning_pipeline.model.cut import size_text


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


def verdict(
    predictions: Sequence[Prediction],
    chosen: Prediction,
    workload: Workload,
    assumptions: Assumptions,
) -> str:
    """Compare the best schedule with one device, and with DDP and FSDP on as many.

    Args:
        predictions: Best first.
        chosen: The one that is shown; said to be too large where it is and another is not.
        workload: What was predicted.
        assumptions: About the machine.
    """
    best, rivals = predictions[0], Rivals(workload, best_sizes(predictions[0]), assumptions)
    if not best.fits:
        return _nothing_fits(best, rivals, assumptions)
    return _too_large(chosen, best, assumptions) + _gain(best, rivals, assumptions)


def best_sizes(best: Prediction) -> tuple[int, int]:
    """Devices and micro-batches of all replicas together."""
    return best.devices, best.plan.num_microbatches * best.replicas


def _too_large(chosen: Prediction, best: Prediction, assumptions: Assumptions) -> str:
    if chosen.fits:
        return ""
    assert assumptions.memory is not None, "without a limit everything fits"
    return (
        f"{chosen.name} does not fit in {size_text(assumptions.memory)}: it needs {size_text(chosen.peak)}. "
        f"Of what fits, {best.name} is the fastest. "
    )


def _gain(best: Prediction, rivals: Rivals, assumptions: Assumptions) -> str:
    need, one_device = rivals.alone, rivals.one_device
    if assumptions.memory is not None and need.total > assumptions.memory:
        return (
            f"One device does not hold the model: it needs {size_text(need.total)} of "
            f"{size_text(assumptions.memory)}. {_speed(best, one_device)}{_beside(best, rivals, assumptions)}"
        )
    return _one_device_holds_it(best, need, one_device, rivals.ddp)


def _beside(best: Prediction, rivals: Rivals, assumptions: Assumptions) -> str:
    """What FSDP would do on the same devices."""
    rival = rivals.fsdp
    if rival is None or best.devices == 1:
        return ""
    if not rival.fits(assumptions):
        return f" FSDP would need {size_text(rival.memory)} on each of these devices, which does not fit."
    less = "less" if rival.step < best.step else "more"
    return (
        f" FSDP on the same devices would take about {seconds_text(rival.step)} a step, {less}, and "
        f"{size_text(rival.memory)} on each."
    )


def _nothing_fits(best: Prediction, rivals: Rivals, assumptions: Assumptions) -> str:
    assert assumptions.memory is not None, "without a limit everything fits"
    rank = max(range(len(best.memory)), key=lambda rank: best.memory[rank].total)
    parts = best.memory[rank]
    fixed = parts.total - parts.activations
    mend = (
        "more stages"
        if fixed > assumptions.memory
        else "more micro-batches, more stages, or recomputed activations"
    )
    rival = rivals.fsdp
    fsdp = (
        f" FSDP on as many devices would fit, with {size_text(rival.memory)} on each."
        if rival is not None and best.devices > 1 and rival.fits(assumptions)
        else ""
    )
    return (
        f"No schedule fits in {size_text(assumptions.memory)}: {best.name} needs {size_text(parts.total)} on "
        f"rank {rank}, {size_text(parts.activations)} of it activations. It takes {mend}.{fsdp}"
    )


def _one_device_holds_it(
    best: Prediction, need: PredictedMemory, one_device: float, ddp: float | None
) -> str:
    ranks = best.plan.num_ranks
    holds = f"One device holds the model ({size_text(need.total)})"
    if ranks > 1 and best.step >= one_device:
        return (
            f"Pipelining does not pay: {holds[0].lower()}{holds[1:]} and takes {seconds_text(one_device)} a "
            f"step; {ranks} devices with {best.name} take {seconds_text(best.step)}."
        )
    if ranks > 1 and ddp is not None and ddp < best.step:
        return (
            f"{holds}, and {ranks} replicas that average their gradients (DDP) would take about "
            f"{seconds_text(ddp)} a step, less than {seconds_text(best.step)} with {best.name}: data "
            "parallelism pays more."
        )
    return f"{holds}. {_speed(best, one_device)}"


def _speed(best: Prediction, one_device: float) -> str:
    ranks = best.plan.num_ranks
    if ranks == 1:
        return f"A step takes {seconds_text(best.step)}."
    return (
        f"{best.name} on {ranks} devices takes {seconds_text(best.step)} a step, "
        f"{one_device / best.step if best.step else 1.0:.1f} times as fast as one device would be."
    )
