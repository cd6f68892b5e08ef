"""What one rank has in memory, and what the plan says that it will hold."""

import resource
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.model.cut import StageActivations
from lightning_pipeline.model.tensors import Held, Peaks, SavedCount, storage_bytes, tensors_in


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One stage. Sizes are bytes.

    Attributes:
        stage: Its index.
        num_parameters: Parameters that it holds; one that stages share is counted on each rank once.
        parameters: Their size.
        gradients: Size of the gradients that there are.
        optimizer_state: Size of all tensors that optimizers keep for its parameters.
        held: Activations held, as counted.
        planned: Activations held at the worst moment of the plan.
    """

    stage: int
    num_parameters: int
    parameters: int
    gradients: int
    optimizer_state: int
    held: Held
    planned: Held

    @property
    def states(self) -> int:
        """Size of everything that lasts from step to step."""
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """One rank. Sizes are bytes.

    Attributes:
        stages: Its stages.
        held: Activations of all its stages together.
        planned: The same at the worst moment of the plan.
        buffers: The most that buffers of messages have taken.
        peak: The allocator's peak on a GPU; the process' largest resident set on CPU.
    """

    stages: tuple[StageMemory, ...]
    held: Held
    planned: Held
    buffers: int
    peak: int


def numbers_in(measured: Any) -> Iterator[int]:
    """The numbers of dataclasses such as `MeasuredMemory` within lists and tuples, one after another."""
    if is_dataclass(measured):
        measured = [getattr(measured, field.name) for field in fields(measured)]
    if isinstance(measured, list | tuple):
        for part in measured:
            yield from numbers_in(part)
    else:
        yield measured


def with_numbers(measured: Any, numbers: Iterator[float]) -> Any:
    """The same with other numbers, in the order of `numbers_in`."""
    if is_dataclass(measured) and not isinstance(measured, type):
        parts = {f.name: with_numbers(getattr(measured, f.name), numbers) for f in fields(measured)}
        return replace(measured, **parts)
    if isinstance(measured, list | tuple):
        return type(measured)(with_numbers(part, numbers) for part in measured)
    return int(next(numbers))


class HeldStages(Protocol):
    """The stages of a rank, as a meter asks them.

    Attributes:
        counts_next: Whether to count activations in the next training step.
        count: That of the last step in which it was counted.
        worst: The worst moment of all steps in which it was.
    """

    counts_next: bool
    count: SavedCount | None
    worst: Peaks

    def counted_now(self) -> dict[int, Held] | None:
        """What each stage holds, where the step that is running counts it."""

    def owned_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters by their first names, tied ones once."""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that keep a copy of a parameter."""


class MemoryMeter(ABC):
    """Measures one rank.

    Args:
        stages: Those of the rank.
        indices: Their numbers.
        optimizers: Gives those of the run.
        device: Of the rank.
    """

    def __init__(
        self, stages: HeldStages, indices: Iterable[int], optimizers: Callable[[], Iterable[Optimizer]],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._stages, self._indices, self.device = stages, sorted(indices), device
        self._optimizers = optimizers
        self._gradients_seen: dict[int, int] = {}

    def count_next(self) -> None:
        """Count activations in the next training step."""
        self._stages.counts_next = True

    def reset_peak(self) -> None:
        """Let the allocator's peak start anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def measure(self) -> MeasuredMemory:
        """This rank, with the worst moment of the last step in which activations were counted."""
        count = self._stages.count
        report = self._report(Peaks() if count is None else count.peaks)
        for stage in report.stages:
            most = max(stage.gradients, self._gradients_seen.get(stage.stage, 0))
            self._gradients_seen[stage.stage] = most
        return report

    def worst(self) -> MeasuredMemory:
        """This rank, with the worst moment of all steps in which activations were counted.

        Gradients are the most that `measure` saw: a validation at the end of `fit` has zeroed them.
        """
        report = self._report(self._stages.worst)
        stages = tuple(
            replace(stage, gradients=max(stage.gradients, self._gradients_seen.get(stage.stage, 0)))
            for stage in report.stages
        )
        return replace(report, stages=stages)

    def now(self) -> MeasuredMemory:
        """This rank at this moment; activations that are not being counted are estimated by the plan."""
        held = self._held_now()
        return self._report(Peaks(held, Held.together(held.values())))

    @abstractmethod
    def _held_now(self) -> dict[int, Held]:
        """Activations of each stage at this moment."""

    @abstractmethod
    def foreseen(self) -> list[StageActivations]:
        """What each stage of the pipeline holds for one micro-batch."""

    @abstractmethod
    def _planned(self) -> tuple[dict[int, Held], Held]:
        """Activations of each stage, and of the rank, at the worst moment of the plan."""

    def _aside(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Parameters with gradients of theirs that are not in `.grad`."""
        return ()

    def _buffer_bytes(self) -> int:
        """The most that buffers of messages have taken."""
        return 0

    def _report(self, held: Peaks) -> MeasuredMemory:
        planned, planned_together = self._planned()
        parameters = self._parameters_by_stage()
        gradients, states = self._gradients(), self._optimizer_states()
        rows = []
        for stage, mine in parameters.items():
            rows.append(
                StageMemory(
                    stage=stage,
                    num_parameters=sum(parameter.numel() for parameter in mine),
                    parameters=storage_bytes(mine),
                    gradients=storage_bytes(t for p in mine for t in gradients.get(id(p), ())),
                    optimizer_state=storage_bytes(t for p in mine for t in states.get(id(p), ())),
                    held=held.stages.get(stage, Held()),
                    planned=planned.get(stage, Held()),
                )
            )
        return MeasuredMemory(
            tuple(rows), held.rank, planned_together, self._buffer_bytes(), peak_bytes(self.device)
        )

    def _parameters_by_stage(self) -> dict[int, list[Tensor]]:
        """A parameter that several stages of this rank use counts for the first of them."""
        found: dict[int, list[Tensor]] = {stage: [] for stage in self._indices}
        for name, parameter in self._stages.owned_parameters():
            stage = next((stage for stage in self._stages.stages_of(name) if stage in found), min(found))
            found[stage].append(parameter)
        return found

    def _gradients(self) -> dict[int, list[Tensor]]:
        found: dict[int, list[Tensor]] = defaultdict(list)
        for parameter, gradient in self._aside():
            found[id(parameter)].append(gradient)
        for _, parameter in self._stages.owned_parameters():
            if parameter.grad is not None:
                found[id(parameter)].append(parameter.grad)
        return found

    def _optimizer_states(self) -> dict[int, list[Tensor]]:
        return {
            id(parameter): list(tensors_in(state))
            for optimizer in self._optimizers()
            for parameter, state in optimizer.state.items()
        }

    def device_sizes(self) -> dict[str, int]:
        """What the device says of itself, in bytes."""
        if self.device.type != "cuda":
            return {"largest resident set": peak_bytes(self.device)}
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "total of the device": torch.cuda.mem_get_info(self.device)[1],
        }


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held: the allocator's peak on a GPU, else its largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
