"""What the user's hooks see of a module that is on stages: one that is whole."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_pipeline.hooks import (
    EpochEndHooks,
    HookLogs,
    SharedMetrics,
    StepWrites,
    answer_calls,
    complete_in_loggers,
)
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.patching import all_undone
from lightning_pipeline.ranks import Board
from lightning_pipeline.run.members import Members
from lightning_pipeline.schedules import Plan


class ServedHooks:
    """Hooks read values that are completed, call units where they are, and log what all stages have.

    Args:
        module: The LightningModule.
        split: This rank's part of it.
        sinks_to: Makes a context in which what is logged goes to a function.
        members: The ranks of the run.
        placement: Which pipeline rank holds which stage.
        trainer: Of the run.
        device: Of this rank.

    Attributes:
        units: Answers calls of units outside of steps, wherever they are.
        meeting: Completes values of several stages.
    """

    def __init__(
        self, module: LightningModule, split: SplitModel,
        sinks_to: Callable[[Callable[..., None]], AbstractContextManager[None]], members: Members,
        placement: Plan, trainer: Trainer, device: torch.device,
    ) -> None:  # fmt: skip
        self._module, self._members, self._trainer = module, members, trainer
        self._split, self._sinks_to = split, sinks_to
        self._undo: list[Callable[[], Any]] = []
        self.units = units = answer_calls(module, split, placement, members.ranks, members.meetings, device)
        self.meeting = split.meeting(
            placement.rank_of, placement.num_ranks,
            lambda what, value: members.by_rank(units.tell(what, value)), lambda: trainer.optimizers,
            units.end,
        )  # fmt: skip
        units.join(self.meeting)

    def serve(self, end_batch: Callable[[bool], bool]) -> SharedMetrics:
        """What hooks at the ends of batches and epochs log and compute is that of all stages from now on.

        Args:
            end_batch: Asks all ranks at the end of a batch whether one raises the flag.
        """
        members, groups, meeting = self._members, self._members.groups, self.meeting

        def asks_all(logged: bool) -> bool:
            self.units.meet()
            with meeting.aside():
                return end_batch(logged)

        board = Board(
            groups.values, groups.waits, groups.replica, members.from_last.source, groups.host,
            members.failure.watch,
        )  # fmt: skip
        metrics = SharedMetrics(self._module, members.from_last, board, groups.data_parallel)
        epoch_end = EpochEndHooks(
            self._trainer, self._split, self._sinks_to, members.from_last, metrics, meeting.aside,
            self.units.place, self.units.come,
        )  # fmt: skip
        logs = HookLogs(self._trainer, members.gather_for("logging in a hook"), asks_all, meeting.later)
        told = self._split.told
        writes = self.writes = StepWrites(self._trainer, told.running)
        told.writes = writes.noted
        complete = partial(meeting.whole, any_size=True)
        loggers = complete_in_loggers(self._trainer.loggers, complete, writes)
        self._undo += [metrics.restore, epoch_end.restore, logs.restore, loggers]
        return metrics

    def restore(self) -> None:
        """Let hooks see what this rank has."""
        undo, self._undo = self._undo, []
        all_undone(undo)()
