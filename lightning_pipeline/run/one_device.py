"""A run that has nothing to split: one stage on one rank of each replica, with whole batches.

It is what Lightning does on one device, and with several replicas its DDP: no trace, nothing of torch or of
the user's that is patched, nothing that is refused. Beside that it is measured as a pipeline is, and knows
where it stands in its data, which two methods of Lightning's loop over batches tell it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from lightning_pipeline.data import Position, batch_size_of
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.measure import Exchange, PipelineRun, WholeMeter
from lightning_pipeline.model.cut import Partition, StageRow, StageTable
from lightning_pipeline.patching import all_undone
from lightning_pipeline.ranks import Numbering, Offset
from lightning_pipeline.recording import MessageLog, OpenRecording, Timeline, stream_clock
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.schedules import Action, OneFOneB, Schedule

Hook = TypeVar("Hook", bound=Callable[..., Any])


class _Pipelined:
    """Puts a function in its place that asks the strategy which of two classes the hook is taken from."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __set_name__(self, owner: type, name: str) -> None:
        hook = self._hook

        @wraps(hook)
        def either(strategy: Any, *args: Any, **kwargs: Any) -> Any:
            if strategy.is_one_device:
                return getattr(super(owner, strategy), name)(*args, **kwargs)
            return hook(strategy, *args, **kwargs)

        setattr(owner, name, either)


def pipelined(hook: Hook) -> Hook:
    """Mark a strategy's hook as one of pipelines. On one device that of the base class is called instead."""
    return cast(Hook, _Pipelined(hook))


class OneDevice(PipelineRun):
    """One run of a Trainer on one device, or as one of several replicas.

    Args:
        device: Of this rank.
        numbering: Of the ranks; each is a pipeline of its own.
        trainer: Of the run.
        schedule: The rule that training plans are made by, where there are stages.

    Attributes:
        position: Where the run stands in its data.
    """

    is_one_device = True

    def __init__(
        self, device: torch.device, numbering: Numbering, trainer: Trainer, schedule: Schedule
    ) -> None:
        self._module, self._numbering = trainer.lightning_module, numbering
        self.schedule, self.root_device = schedule, device
        self.pipeline_rank, self.stages_here = 0, (0,)
        self.replica_index = numbering.coordinates(trainer.global_rank)[1]
        self.num_replicas = numbering.replicas
        self.position = Position(trainer)
        self._undo = [self.position.install()]
        self.timeline = Timeline(stream_clock(device))
        self.memory = self._meter = WholeMeter(self._module, lambda: trainer.optimizers, device)
        self.exchange = Exchange(self._begin_to_gather)
        self._offsets: list[Offset] = []
        self._recording: OpenRecording | None = None
        self._round, self._in_step = 0, False

    def close(self) -> None:
        """End the run."""
        undo, self._undo = self._undo, []
        all_undone(undo)()

    def at_end(self, undo: Callable[[], None]) -> None:
        """Call something when the run ends, before what was added earlier."""
        self._undo.append(undo)

    # What happens

    def begin_batch(self, batch: Any) -> None:
        """A training batch begins."""
        self._recording, self._round = self.timeline.begin_open(), 0
        try:
            self.batch_size = batch_size_of(batch)
        except ConfigurationError:
            self.batch_size = None
        self.last_plan = OneFOneB().plan(1, 1)
        self._meter.begin_batch(batch)

    def end_batch(self) -> None:
        """The training batch is over, or the run."""
        self._recording = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The user's training step. Backwards in it, those of manual optimization, are told apart.

        What Lightning or an optimizer does until the next action counts as the one before it.
        """
        record = self._recording
        if record is None:
            yield
            return
        if record.actions:
            record.extend()
        record.start(Action(0, "F", self._round))
        self._in_step, rounds = True, self._round
        try:
            with self._meter.forward():
                yield
        finally:
            self._in_step = False
            (record.end if self._round == rounds else record.drop)()

    def begin_backward(self) -> None:
        """A backward begins, after the step or in it."""
        record = self._recording
        if record is not None and record.actions:
            (record.end if self._in_step else record.extend)()
            record.start(Action(0, "B", self._round))
            self._meter.backward_begins()

    def end_backward(self) -> None:
        """The backward is done."""
        record = self._recording
        if record is not None and record.actions:
            record.end()
            self._meter.backward_done()
            self._round += 1
            self.last_plan = OneFOneB().plan(1, self._round)
            if self._in_step:
                record.start(Action(0, "F", self._round))

    # What is known

    @property
    def table(self) -> StageTable:
        """The one stage."""
        names = tuple(name for name, _ in self._module.named_children())
        count = sum(parameter.numel() for parameter in parameters_of(self._module))
        return StageTable((StageRow(0, names, count, 1.0, 0, 0, ""),), "one device")

    @property
    @override
    def bytes_sent(self) -> int:
        return 0

    @property
    @override
    def messages(self) -> MessageLog | None:
        return None

    @property
    def partition(self) -> Partition:
        """There is none.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("with one stage on one rank nothing is traced, so there is no partition")

    @property
    def clock_offsets(self) -> list[Offset]:
        """Of this rank's clock from itself; empty before `align_clocks`."""
        return self._offsets

    def align_clocks(self, exchanges: int = 8) -> list[Offset]:
        """This rank's clock is that of its pipeline."""
        self._offsets = [Offset()]
        return self._offsets

    def record_messages(self, on: bool) -> None:
        """There are none."""

    def own_parameters(self) -> Iterator[Tensor]:
        """Those of the module, tied ones once."""
        return parameters_of(self._module)

    def gather_from_pipeline(self, value: Any) -> list[Any]:
        """An object of every rank of this replica."""
        return [value]

    def gather_numbers(self, values: Sequence[float]) -> list[list[list[float]]]:
        """As many float64 of every rank, by replica and pipeline rank; all ranks must call."""
        if self._numbering.replicas == 1:
            return [[list(values)]]
        found: list[Any] = [None] * self._numbering.world_size
        dist.all_gather_object(found, list(values))
        return [[found[rank] for rank in ranks] for ranks in self._numbering.pipelines()]

    def _begin_to_gather(self, values: Sequence[float]) -> Callable[[], list[list[list[float]]]]:
        found = self.gather_numbers(values)
        return lambda: found

    def clip(self, parameters: Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip gradients by their norm."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=error_if_nonfinite)

    def resume(self, stood: Mapping[str, Any] | None) -> None:
        """Go on where the saved run stood in its data and random numbers; `None`: that is not known."""
        self.position.resume(stood)
