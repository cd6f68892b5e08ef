"""Numbers of all ranks of a pipeline, by stage, for the callbacks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import Trainer

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.measure.exchange import Exchange
from lightning_pipeline.measure.memory import MemoryMeter
from lightning_pipeline.model.cut import Partition
from lightning_pipeline.ranks import Offset
from lightning_pipeline.recording import MessageLog, Timeline
from lightning_pipeline.schedules import Plan, Schedule


class PipelineRun(Protocol):
    """What the callbacks ask of the strategy."""

    timeline: Timeline

    @property
    def is_one_device(self) -> bool:
        """Whether there is nothing to split, and nothing to advise."""
        ...

    @property
    def clock_offsets(self) -> list[Offset]:
        """How far the ranks' clocks are from pipeline rank 0's; empty before `align_clocks`."""
        ...

    def record_messages(self, on: bool) -> None:
        """Write down every message of this rank, from the next step on; or stop it."""
        ...

    @property
    def messages(self) -> MessageLog | None:
        """Those of the last step on this rank; `None` while they are not recorded."""
        ...

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas of the pipeline."""
        ...

    @property
    def replica_index(self) -> int:
        """This rank's position among the data-parallel replicas."""
        ...

    def align_clocks(self, exchanges: int = 8) -> list[Offset]:
        """Measure them; all ranks of the replica must call."""
        ...

    def before_fetch(self, trainer: Trainer, call: Callable[[], None]) -> Callable[[], None]:
        """Call something each time the training loop turns to its loader; gives the undoing."""
        ...

    def logging_step(self, trainer: Trainer) -> int:
        """The step under which loggers get what is logged now."""
        ...

    def logs_this_batch(self, trainer: Trainer) -> bool:
        """Whether Lightning sends the metrics of this training batch to loggers; the same on all ranks."""
        ...

    @property
    def schedule(self) -> Schedule:
        """The rule that training plans are made by."""
        ...

    @property
    def stages_here(self) -> tuple[int, ...]:
        """The stages that this rank holds."""
        ...

    @property
    def pipeline_rank(self) -> int:
        """This rank's position in its pipeline."""
        ...

    @property
    def bytes_sent(self) -> int:
        """That this rank has sent to other stages so far."""
        ...

    @property
    def memory(self) -> MemoryMeter:
        """Measures the memory of this rank."""
        ...

    @property
    def exchange(self) -> Exchange:
        """Gathers what the callbacks tell of a batch."""
        ...

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        ...

    def own_parameters(self) -> Iterable[torch.Tensor]:
        """This rank's parameters, tied ones once."""
        ...

    @property
    def partition(self) -> Partition:
        """Where the module is cut."""
        ...

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last training step, `None` before the first."""
        ...

    @property
    def batch_size(self) -> int | None:
        """Samples in the last training batch of this replica; `None` where the batch does not tell."""
        ...

    def gather_from_pipeline(self, value: Any) -> list[Any]:
        """A picklable value of every rank of the replica, by pipeline rank; all its ranks must call."""
        ...

    def gather_numbers(self, values: Sequence[float]) -> list[list[list[float]]]:
        """As many float64 of every rank, by replica and pipeline rank; all ranks must call."""
        ...


def run_of(trainer: Trainer, callback: object) -> PipelineRun:
    """The strategy of a Trainer, as the callbacks see it.

    Raises:
        ConfigurationError: It is not a PipelineStrategy.
    """
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "gather_from_pipeline"):
        raise ConfigurationError(
            f"{type(callback).__name__} measures pipelines: use it with PipelineStrategy, not "
            f"with {type(strategy).__name__}"
        )
    return cast(PipelineRun, strategy)


def stage_names(per_rank: Sequence[Sequence[int]]) -> list[str]:
    """A key for each rank of the pipeline: `stage_0`, or `stages_0_2` where a rank holds several."""
    return [f"{'stage' if len(held) == 1 else 'stages'}_{'_'.join(map(str, held))}" for held in per_rank]
