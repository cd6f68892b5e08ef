"""What the callbacks ask of a rank that holds stages."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_pipeline.executor import Executor
from lightning_pipeline.model.cut import Partition
from lightning_pipeline.model.replay import SplitModel
from lightning_pipeline.ranks import Company, Groups, Offset
from lightning_pipeline.recording import MessageLog, Timeline


class StageMeasures:
    """Times, messages and parameters of this rank's stages.

    Args:
        split: The stages.
        executor: Runs them.
        groups: Of the run.
    """

    def __init__(self, split: SplitModel, executor: Executor, groups: Groups) -> None:
        self._split, self._executor, self._groups = split, executor, groups

    @property
    def timeline(self) -> Timeline:
        """What happened in the last step on this rank."""
        return self._executor.timeline

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other stages."""
        return sum(channel.bytes_sent for channel in self._executor.channels.values())

    @property
    def clock_offsets(self) -> list[Offset]:
        """How far the ranks' clocks are from pipeline rank 0's; empty before `align_clocks`."""
        return self._executor.clocks.offsets

    def align_clocks(self, exchanges: int = 8) -> list[Offset]:
        """Measure `clock_offsets`; all ranks of the replica must call."""
        return self._executor.clocks.align(exchanges)

    def record_messages(self, on: bool) -> None:
        """Write down every message of this rank, from the next step on; or stop it."""
        self._executor.record_messages(on)

    @property
    def messages(self) -> MessageLog | None:
        """Those of the last step on this rank; `None` while they are not recorded."""
        return self._executor.log

    @property
    def partition(self) -> Partition:
        """Where the module is cut."""
        return self._split.cut

    def own_parameters(self) -> Iterator[Tensor]:
        """This rank's parameters, tied ones once."""
        return (parameter for _, parameter in self._split.owned_parameters())

    def gather_numbers(self, values: Sequence[float]) -> list[list[list[float]]]:
        """As many float64 of every rank, by replica and pipeline rank; all ranks must call."""
        groups = self._groups
        world = Company(groups.control, self._executor.failure, groups.global_rank)
        found = world.numbers("gathering what was measured", values)
        return [[found[rank] for rank in ranks] for ranks in groups.numbering.pipelines()]
