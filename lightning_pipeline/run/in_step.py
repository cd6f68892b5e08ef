"""Keeps the ranks of a run in step where Lightning lets each decide by itself."""

import zlib
from collections.abc import Callable
from typing import Any, TypeGuard

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import Checkpoints
from lightning_pipeline.data import random_states, set_random_states
from lightning_pipeline.errors import BatchMismatchError, CheckpointError, SplitError
from lightning_pipeline.patching import all_undone
from lightning_pipeline.ranks import all_end_alike
from lightning_pipeline.run.members import Members


def quits(exception: BaseException) -> TypeGuard[SystemExit]:
    """Whether it is `sys.exit(0)`, which says that all went well."""
    return (
        isinstance(exception, SystemExit)
        and not isinstance(exception, SIGTERMException)
        and not exception.code
    )


def is_refusal(exception: BaseException) -> bool:
    """Whether it says that stages cannot do what the user's code asks for."""
    return isinstance(exception, SplitError)


def saver_of(trainer: Trainer) -> ModelCheckpoint | None:
    """The callback in whose folder a run is saved before a refusal; `None` where none would be."""
    savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return next((one for one in savers if one.dirpath is not None), None) if trainer.training else None


class RanksInStep:
    """What the strategy does at hooks and ends of batches.

    `trainer.should_stop` is read per rank: one that stops alone leaves the others waiting, so that any
    rank's flag becomes all ranks' after the same batch. So does a SIGTERM that reached one of them: Lightning
    tells the others from inside the signal's handler, in the middle of a step, which hangs. So does SLURM's
    signal to save and requeue. And samplers draw their order from the random state at the start of an epoch,
    which code for rank 0 only may have moved.

    Args:
        members: The ranks to ask.
        epoch_starts: Called when an epoch does.
        saves: Of the run.

    Attributes:
        ending: Whether all ranks are about to end at one point: by a SIGTERM, or an exception of all.
    """

    def __init__(self, members: Members, epoch_starts: Callable[[], None], saves: Checkpoints) -> None:
        self._members, self._epoch_starts, self._saves = members, epoch_starts, saves
        self._told_to_end = self._told_to_requeue = False
        self._requeue: Callable[[], None] | None = None
        self.ending = self._saves_on_exception = self._saves_refusals = False

    def watch_signals(self, trainer: Trainer) -> Callable[[], None]:
        """From now on end the run, or save it for a new job, at one batch of all ranks.

        In a run that only evaluates a SIGTERM ends this rank's at once.

        Returns:
            Undoes it.
        """
        self._saves_on_exception = any(
            getattr(one, "save_on_exception", isinstance(one, OnExceptionCheckpoint))
            for one in trainer.checkpoint_callbacks
        )
        self._saves_refusals = saver_of(trainer) is not None
        return all_undone(
            [
                self._watch_sigterm(trainer),
                self._watch_requeue(trainer),
                _lightning.after_epoch(trainer, lambda: self._end_epoch(trainer)),
            ]
        )

    def _watch_requeue(self, trainer: Trainer) -> Callable[[], None]:
        def told() -> None:
            if trainer.state.fn == TrainerFn.FITTING:
                self._told_to_requeue = True
            else:
                rank_zero_warn("SLURM's signal to requeue (SIGUSR1) came in a run that trains nothing: "
                               "nothing is saved, and the job is not queued again")  # fmt: skip

        self._requeue, undo = _lightning.on_requeue(trainer, told)
        return undo

    def _watch_sigterm(self, trainer: Trainer) -> Callable[[], None]:

        def told() -> None:
            if trainer.state.fn == TrainerFn.FITTING:  # validation and the time between epochs too
                self._told_to_end = True
            else:
                _lightning.set_received_sigterm(trainer)

        return _lightning.on_sigterm(trainer, told)

    def all_raise(self, exception: BaseException) -> bool:
        """Whether all ranks raise this between the same two exchanges: they all answer, and end together.

        Nobody is asked where nothing depends on it: where that moment would not be saved, and the exception
        does not say that all went well.
        """
        groups, failure = self._members.groups, self._members.failure
        fails = isinstance(exception, Exception) and not isinstance(exception, CheckpointError)
        in_hook = groups.lookout.doing() not in _lightning.STEPS.values()
        saved = self._saves_on_exception or (self._saves_refusals and in_hook and is_refusal(exception))
        matters = quits(exception) or (saved and fails)
        if not matters or groups.aborted or failure.cause is not None:
            return False
        counts = (self._members.world.exchanges, self._members.replica.exchanges)
        kind = "a refusal" if is_refusal(exception) else type(exception).__name__
        place = f"{kind} after {counts} exchanges in {groups.lookout.doing()}"
        size = groups.numbering.world_size
        self.ending = all_end_alike(groups.notes, groups.global_rank, size, place)
        if self.ending and fails:
            failure.write_down(exception)
        return self.ending

    def equal_random_states(self) -> None:
        """Give all stages of a replica the same random states, where they differ."""
        states = random_states()
        own = zlib.crc32(repr(states).encode())
        if len(set(self._members.gather(own, "comparing random states"))) > 1:
            set_random_states(self._members.from_last.share(lambda: states))

    def at_hooks(self, trainer: Trainer, *, several: bool) -> dict[tuple[str, str], Callable[[], Any]]:
        """What to do before hooks of Lightning, see `_lightning.before_hooks`.

        With several replicas Lightning has to reduce what was logged over them on all ranks, once an epoch:
        later it would when somebody asks, and a progress bar asks on global rank 0 alone.

        Args:
            trainer: In its training.
            several: Whether there are several replicas.
        """
        reduced: list[int] = []

        def start_epoch() -> None:
            self._epoch_starts()
            self.equal_random_states()

        def reduce_logs() -> None:
            if reduced != [trainer.current_epoch]:
                reduced[:] = [trainer.current_epoch]
                trainer.callback_metrics  # noqa: B018  # Lightning keeps the values from then on

        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("LightningModule", "on_train_epoch_start"): start_epoch,
            ("LightningModule", "on_validation_end"): lambda: self.stop_together(trainer),
            ("LightningModule", "on_train_end"): self._saves.finish,
        }
        if several:
            calls["Callback", "on_train_epoch_end"] = reduce_logs
            calls["LightningModule", "on_train_epoch_end"] = reduce_logs
        return calls

    def _end_epoch(self, trainer: Trainer) -> None:
        """After all hooks of an epoch's end, any of which may ask to stop."""
        self.stop_together(trainer)
        if self.ending:
            raise SIGTERMException

    def end_batch(self, trainer: Trainer, *flags: bool) -> list[bool]:
        """Called at the end of each training batch: `stop_together`, and all ends of data are one.

        Args:
            trainer: In its training.
            flags: Anything to ask of the ranks along with it.

        Returns:
            For each flag whether any rank raised it.

        Raises:
            BatchMismatchError: The data of some ranks has ended, on every rank.
        """
        is_last = _lightning.is_last_batch(trainer)
        some_end, some_go_on, *raised = self._agree(trainer, is_last, not is_last, *flags)
        if some_end and some_go_on:
            ended = self._members.world.gather("comparing the ends of the data", is_last)
            names = ", ".join(str(rank) for rank, last in sorted(ended.items()) if last)
            batches = _lightning.batches_of_epoch(trainer)
            raise BatchMismatchError(
                f"the data of global rank {names} ended after {batches} batches, and other ranks have more: "
                "give each stage the same batches and each replica as many, or let one rank load for all: "
                'PipelineStrategy(data="broadcast")'
            )
        return raised

    def stop_together(self, trainer: Trainer) -> None:
        """Make any rank's wish to stop all ranks'."""
        self._agree(trainer)

    def _agree(self, trainer: Trainer, *flags: bool) -> list[bool]:
        """Stop, end and requeue together; tells for each flag whether any rank raised it."""
        stop, self.ending, requeue, *raised = self._members.any_of(
            bool(trainer.should_stop), self._told_to_end, self._told_to_requeue, *flags
        )
        trainer.should_stop = stop
        if requeue and self._requeue is not None and not trainer.sanity_checking:
            save_and_requeue, self._requeue = self._requeue, None  # once a job: ranks are told one by one
            with self._saves.at_once():
                save_and_requeue()
        if self.ending:
            where = f"{trainer.global_step} optimizer steps, in epoch {trainer.current_epoch}"
            rank_zero_info(f"SIGTERM: all ranks end after {where}")
            _lightning.set_received_sigterm(trainer)
        return raised
