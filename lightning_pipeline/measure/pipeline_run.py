"""What is known of the run under way on this rank: its places, and what its steps did."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_pipeline import _lightning
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.measure.exchange import Exchange
from lightning_pipeline.measure.memory import MemoryMeter
from lightning_pipeline.model.cut import Partition
from lightning_pipeline.ranks import Offset
from lightning_pipeline.recording import MessageLog, Timeline
from lightning_pipeline.schedules import Plan, Schedule


class PipelineRun(ABC):
    """What is known of a run, from the making of its stages to its end. The strategy has it as `run`.

    Attributes:
        is_one_device: Whether there is nothing to split, and nothing to advise.
        schedule: The rule that training plans are made by.
        root_device: Of this rank.
        pipeline_rank: This rank's position in its pipeline.
        stages_here: The stages that this rank holds.
        replica_index: This rank's position among the data-parallel replicas.
        num_replicas: Of the pipeline.
        timeline: What happened in the last step on this rank.
        exchange: Gathers what the callbacks tell of a batch.
        memory: Measures the memory of this rank.
        last_plan: The plan of the last training step, `None` before the first.
        batch_size: Samples in the last training batch; `None` where the batch does not tell.
    """

    is_one_device: bool
    schedule: Schedule
    root_device: torch.device
    pipeline_rank: int
    stages_here: tuple[int, ...]
    replica_index: int
    num_replicas: int
    timeline: Timeline
    exchange: Exchange
    memory: MemoryMeter
    last_plan: Plan | None = None
    batch_size: int | None = None

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other stages."""

    @property
    @abstractmethod
    def messages(self) -> MessageLog | None:
        """Those of the last step on this rank; `None` while they are not recorded."""

    @abstractmethod
    def record_messages(self, on: bool) -> None:
        """Write down every message of this rank, from the next step on; or stop it."""

    @property
    @abstractmethod
    def clock_offsets(self) -> list[Offset]:
        """How far the ranks' clocks are from pipeline rank 0's; empty before `align_clocks`."""

    @abstractmethod
    def align_clocks(self, exchanges: int = 8) -> list[Offset]:
        """Measure `clock_offsets`; all ranks of the replica must call."""

    @property
    @abstractmethod
    def partition(self) -> Partition:
        """Where the module is cut."""

    @abstractmethod
    def own_parameters(self) -> Iterator[Tensor]:
        """This rank's parameters, tied ones once."""

    @abstractmethod
    def gather_from_pipeline(self, value: Any) -> list[Any]:
        """A picklable value of every rank of this replica, by pipeline rank; all of them must call."""

    @abstractmethod
    def gather_numbers(self, values: Sequence[float]) -> list[list[list[float]]]:
        """As many float64 of every rank, by replica and pipeline rank; all ranks must call."""

    @staticmethod
    def before_fetch(trainer: Trainer, call: Callable[[], None]) -> Callable[[], None]:
        """Call something each time the training loop turns to its loader; returns what undoes it."""
        return _lightning.before_fetch(trainer, call)


def run_of(trainer: Trainer, callback: object) -> PipelineRun:
    """The run of a Trainer, as the callbacks see it once its module is split.

    Raises:
        ConfigurationError: Its strategy is not a PipelineStrategy.
    """
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "gather_from_pipeline"):
        raise ConfigurationError(
            f"{type(callback).__name__} measures pipelines: use it with PipelineStrategy, not "
            f"with {type(strategy).__name__}; PipelineStrategy(stages=1) is one device"
        )
    run: PipelineRun = strategy.run
    return run


def stage_names(per_rank: Sequence[Sequence[int]]) -> list[str]:
    """A key for each rank of the pipeline: `stage_0`, or `stages_0_2` where a rank holds several."""
    return [f"{'stage' if len(held) == 1 else 'stages'}_{'_'.join(map(str, held))}" for held in per_rank]
