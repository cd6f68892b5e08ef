"""Measures a rank that holds stages, against the plan that they run by."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.executor import Executor
from lightning_pipeline.measure import HeldStages, MemoryMeter
from lightning_pipeline.model.cut import Partition, StageActivations, peak_activations, stage_activations
from lightning_pipeline.model.tensors import Held
from lightning_pipeline.schedules import Plan


class StagesMeter(MemoryMeter):
    """Measures one rank of a pipeline.

    Args:
        split: Its stages.
        cut: Where they were cut.
        executor: Runs them.
        waiting: Gives, of a stage, the micro-batches that wait for a backward, and for a W.
        plan: Gives the plan of the last step, None before the first.
        optimizers: Gives those of the run.
        aside: Gives parameters with gradients of theirs that are not in `.grad`.
        device: Of the rank.
    """

    def __init__(
        self,
        split: HeldStages,
        cut: Partition,
        executor: Executor,
        waiting: Callable[[int], tuple[int, int]],
        plan: Callable[[], Plan | None],
        optimizers: Callable[[], Iterable[Optimizer]],
        aside: Callable[[], Iterable[tuple[Tensor, Tensor]]],
        device: torch.device,
    ) -> None:
        super().__init__(split, executor.stages, optimizers, device)
        self.split, self.plan, self._gradients_aside = split, plan, aside
        self._cut, self._executor, self._waiting = cut, executor, waiting
        self._foreseen: list[StageActivations] = []
        self._peaks: tuple[Plan | None, dict[int, Held], Held] = (None, {}, Held())

    @override
    def _held_now(self) -> dict[int, Held]:
        counted = self.split.counted_now()
        if counted is not None:
            return counted
        held = {}
        for stage in self._indices:
            (saved, waiting), foreseen = self._waiting(stage), self.foreseen()[stage]
            size = saved * foreseen.until_backward + waiting * foreseen.until_weight
            held[stage] = Held(size, saved + waiting)
        return held

    @override
    def foreseen(self) -> list[StageActivations]:
        plan = self.plan()
        if not self._foreseen and plan is not None:
            ranks = [plan.rank_of(stage) for stage in range(plan.num_stages)]
            self._foreseen = stage_activations(self._cut, ranks)
        return self._foreseen or stage_activations(self._cut)

    @override
    def _planned(self) -> tuple[dict[int, Held], Held]:
        plan = self.plan()
        if plan is not None and plan is not self._peaks[0]:
            stages, ranks = peak_activations(plan, self.foreseen())
            self._peaks = plan, stages, ranks[self._executor.rank]
        return self._peaks[1:]

    @override
    def _aside(self) -> Iterable[tuple[Tensor, Tensor]]:
        return self._gradients_aside()

    @override
    def _buffer_bytes(self) -> int:
        return self._executor.buffer_bytes
