"""What is known of a run whose module is split."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipeline.executor import Executor
from lightning_pipeline.measure import Exchange, PipelineRun
from lightning_pipeline.model.cut import Partition
from lightning_pipeline.model.split import OutsideSteps
from lightning_pipeline.ranks import Company, Groups, Offset
from lightning_pipeline.recording import MessageLog
from lightning_pipeline.schedules import Schedule


class StagesRun(PipelineRun):
    """The stages of this rank, as others ask of them.

    Args:
        split: The stages.
        executor: Runs them.
        groups: Of the run.
        schedule: The rule that training plans are made by.
        device: Of this rank.
        gather: Gives a picklable value of every rank of this replica, by pipeline rank.
        exchange: Gathers what the callbacks tell of a batch.
    """

    is_one_device = False

    def __init__(
        self, split: OutsideSteps, executor: Executor, groups: Groups, schedule: Schedule,
        device: torch.device, gather: Callable[[Any], list[Any]], exchange: Exchange,
    ) -> None:  # fmt: skip
        self._split, self._executor, self._groups, self._gather = split, executor, groups, gather
        self.exchange, self.schedule, self.root_device = exchange, schedule, device
        self.pipeline_rank, self.stages_here = groups.rank, tuple(executor.stages)
        self.replica_index, self.num_replicas = groups.replica, groups.numbering.replicas
        self.timeline = executor.timeline

    @property
    @override
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._executor.channels.values())

    @property
    @override
    def messages(self) -> MessageLog | None:
        return self._executor.log

    @override
    def record_messages(self, on: bool) -> None:
        self._executor.record_messages(on)

    @property
    @override
    def clock_offsets(self) -> list[Offset]:
        return self._executor.clocks.offsets

    @override
    def align_clocks(self, exchanges: int = 8) -> list[Offset]:
        return self._executor.clocks.align(exchanges)

    @property
    @override
    def partition(self) -> Partition:
        return self._split.cut

    @override
    def own_parameters(self) -> Iterator[Tensor]:
        return (parameter for _, parameter in self._split.owned_parameters())

    @override
    def gather_from_pipeline(self, value: Any) -> list[Any]:
        return self._gather(value)

    @override
    def gather_numbers(self, values: Sequence[float]) -> list[list[list[float]]]:
        groups = self._groups
        world = Company(groups.control, self._executor.failure.watch, groups.global_rank)
        found = world.numbers("gathering what was measured", values)
        return [[found[rank] for rank in ranks] for ranks in groups.numbering.pipelines()]
