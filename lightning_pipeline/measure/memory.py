"""What one rank has in memory, and what the plan says that it will hold."""

import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.executor import Executor
from lightning_pipeline.model.cut import StageActivations, peak_activations, stage_activations
from lightning_pipeline.model.replay import SplitModel
from lightning_pipeline.model.tensors import Held, Peaks, storage_bytes, tensors_in
from lightning_pipeline.schedules import Plan


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
class RankMemory:
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
    """The numbers of dataclasses such as `RankMemory` within lists and tuples, one after another."""
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


class MemoryMeter:
    """Measures one rank.

    Args:
        split: Its stages.
        executor: Runs them.
        plan: Gives the plan of the last step, None before the first.
        optimizers: Gives those of the run.
        aside: Gives parameters with gradients of theirs that are not in `.grad`.
        device: Of the rank.
    """

    def __init__(
        self,
        split: SplitModel,
        executor: Executor,
        plan: Callable[[], Plan | None],
        optimizers: Callable[[], Iterable[Optimizer]],
        aside: Callable[[], Iterable[tuple[Tensor, Tensor]]],
        device: torch.device,
    ) -> None:
        self.split, self.executor, self.device = split, executor, device
        self.plan, self._optimizers, self._aside = plan, optimizers, aside
        self._foreseen: list[StageActivations] = []
        self._gradients_seen: dict[int, int] = {}
        self._peaks: tuple[Plan | None, dict[int, Held], Held] = (None, {}, Held())

    def count_next(self) -> None:
        """Count activations in the next training step."""
        self.split.counts_next = True

    def reset_peak(self) -> None:
        """Let the allocator's peak start anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def measure(self) -> RankMemory:
        """This rank, with the worst moment of the last step in which activations were counted."""
        count = self.split.count
        report = self._report(Peaks() if count is None else count.peaks)
        for stage in report.stages:
            most = max(stage.gradients, self._gradients_seen.get(stage.stage, 0))
            self._gradients_seen[stage.stage] = most
        return report

    def worst(self) -> RankMemory:
        """This rank, with the worst moment of all steps in which activations were counted.

        Gradients are the most that `measure` saw: a validation at the end of `fit` has zeroed them.
        """
        report = self._report(self.split.worst)
        stages = tuple(
            replace(stage, gradients=max(stage.gradients, self._gradients_seen.get(stage.stage, 0)))
            for stage in report.stages
        )
        return replace(report, stages=stages)

    def now(self) -> RankMemory:
        """This rank at this moment; activations that are not being counted are estimated by the plan."""
        held = self._held_now()
        return self._report(Peaks(held, Held.together(held.values())))

    def _held_now(self) -> dict[int, Held]:
        counted = self.split.counted_now()
        if counted is not None:
            return counted
        held = {}
        for stage in self.executor.stages:
            program, foreseen = self.split.stage(stage), self.foreseen()[stage]
            size = program.num_saved * foreseen.until_backward + program.num_waiting * foreseen.until_weight
            held[stage] = Held(size, program.num_saved + program.num_waiting)
        return held

    def foreseen(self) -> list[StageActivations]:
        """What each stage of the pipeline holds for one micro-batch."""
        plan = self.plan()
        if not self._foreseen and plan is not None:
            ranks = [plan.rank_of(stage) for stage in range(plan.num_stages)]
            self._foreseen = stage_activations(self.split.cut, ranks)
        return self._foreseen or stage_activations(self.split.cut)

    def _planned(self) -> tuple[dict[int, Held], Held]:
        plan = self.plan()
        if plan is not None and plan is not self._peaks[0]:
            stages, ranks = peak_activations(plan, self.foreseen())
            self._peaks = plan, stages, ranks[self.executor.rank]
        return self._peaks[1:]

    def _report(self, held: Peaks) -> RankMemory:
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
        return RankMemory(
            tuple(rows), held.rank, planned_together, self.executor.buffer_bytes, peak_bytes(self.device)
        )

    def _parameters_by_stage(self) -> dict[int, list[Tensor]]:
        """A parameter that several stages of this rank use counts for the first of them."""
        found: dict[int, list[Tensor]] = {stage: [] for stage in sorted(self.executor.stages)}
        for name, parameter in self.split.owned_parameters():
            stage = next((stage for stage in self.split.stages_of(name) if stage in found), min(found))
            found[stage].append(parameter)
        return found

    def _gradients(self) -> dict[int, list[Tensor]]:
        found: dict[int, list[Tensor]] = defaultdict(list)
        for parameter, gradient in self._aside():
            found[id(parameter)].append(gradient)
        for _, parameter in self.split.owned_parameters():
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
