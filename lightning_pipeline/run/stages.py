"""What a run has once its module is split: this rank's stages, and all that works on them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_pipeline import _lightning
from lightning_pipeline.executor import Executor
from lightning_pipeline.hooks import (
    LockSteps,
    LogRecorder,
    Reads,
    UncutBatch,
    join_scaler,
)
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.patching import all_undone
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.run.batch import (
    Batch,
    Plans,
    StagesMeter,
    Steps,
    reordering_by,
    watch_memory,
)
from lightning_pipeline.run.held import StagesHeld
from lightning_pipeline.run.members import Members
from lightning_pipeline.run.served import ServedHooks
from lightning_pipeline.run.setup import (
    Cut,
    beside_module,
    loggers_set_aside,
)
from lightning_pipeline.run.stages_run import StagesRun
from lightning_pipeline.schedules import Plan
from lightning_pipeline.settings import Settings


class Stages(StagesHeld):
    """The stages of this rank in one run; `Whole` answers the same before and without them.

    Args:
        members: The ranks of the run.
        settings: Of the strategy.
        placement: Which pipeline rank holds which stage.
        trainer: Of the run.
        cut: Where the module is cut.
        split: This rank's part of it.
        says: What the run does, in a line.

    Attributes:
        says: That, and how tensors travel between stages.
        executor: Runs plans on it.
        run: What is known of it, and what its steps did.
        reads: Brings to stages what steps read there.
        steps: What its batches have in common.
    """

    def __init__(
        self, members: Members, settings: Settings, placement: Plan, trainer: Trainer, cut: Cut,
        split: SplitModel, says: str,
    ) -> None:  # fmt: skip
        super().__init__(members, settings, placement, trainer, cut, split)
        self.table = cut.table
        self.says = "\n".join(filter(None, [says, members.groups.ways]))
        self._device: torch.device = trainer.strategy.root_device

    # Setting up

    def connect(
        self, recorder: LogRecorder, plans: Plans, plugin: Precision, end_batch: Callable[..., list[bool]],
        num_microbatches: int, at_least: int,
    ) -> None:  # fmt: skip
        """Make what runs the stages, and let the user's hooks see a whole module; all ranks call.

        Args:
            recorder: Where `self.log` goes during a step.
            plans: For any number of micro-batches.
            plugin: The precision plugin.
            end_batch: Asks all ranks at the end of a batch for each flag whether one raises it.
            num_microbatches: What a batch is cut into.
            at_least: Samples that each micro-batch should have.
        """
        members, split, trainer = self._members, self.split, self._trainer
        groups = members.groups
        scaled = join_scaler(plugin, groups.pipeline)
        split.compile_units(getattr(trainer.strategy, "compiles", None))
        self._let_steps_see(scaled)
        if groups.numbering.replicas == 1:
            _lightning.silence_sync_dist_advice()
        stages = {index: split.programs.executed(index) for index in self._here}
        self.executor = Executor(stages, groups, device=self._device, failure=members.failure)
        self.run = StagesRun(
            split,
            self.executor,
            groups,
            self._settings.schedule,
            self._device,
            members.gather,
            members.exchange,
        )
        self.hold()
        served = ServedHooks(
            self._module, split, split.sinks_to, members, self._placement, trainer, self._device,
        )  # fmt: skip
        self.meeting, self.units, members.aside = served.meeting, served.units, self.aside
        self._undo += [_lightning.around_hooks(trainer, self.meeting.hook, members.gather), served.restore]
        self.start_equal()

        def ends(logged: bool) -> bool:
            raised, others = end_batch(logged, self.hooks.has_changed())
            if others:
                self.hooks.agree()
            return raised

        metrics = served.serve(ends)

        @contextmanager
        def aside() -> Iterator[None]:
            with loggers_set_aside(trainer), served.writes.dropped():
                yield

        split.set_aside = aside
        self.lockstep = LockSteps(
            self._module, split.known.refusal, self.meeting, metrics, members.replica, members.from_last,
            split.forward_context, keeps=split.has_last_stage,
        )  # fmt: skip
        self.reads = Reads(split, self.meeting, members.gather, self.spread)
        reordering = reordering_by(
            self._settings.schedule, self._partition, members.gather_for("measuring the stages"),
            members.from_zero.share,
        )  # fmt: skip
        self.steps = Steps(
            self._module, split, self.executor, self.run, plans, recorder, served.writes, metrics,
            groups.replica, members.from_last, groups.pipeline, self._settings.loss_weighting,
            self._settings.loss_over_batch, num_microbatches, at_least, self._reads_outputs(), reordering,
        )  # fmt: skip
        if self._trains_whole and trainer.training:
            self._undo.append(self.meeting.watch_gradients(parameters_of(self._module)))
        looks = self._settings.on_nonfinite != "ignore" and scaled is None  # a scaler decides by itself
        if looks and trainer.training and self._trains_whole:
            self.gradients.look_at_steps(members.replica)
        elif looks and trainer.training:
            self.gradients.look(self.steps.reports)
        run = self.run
        run.memory = StagesMeter(
            split, split.cut, self.executor, split.programs.waiting, lambda: run.last_plan,
            lambda: trainer.optimizers, self.gradients.aside.held, self._device,
        )  # fmt: skip
        watch_memory(run.memory, run, members.failure)

    def _reads_outputs(self) -> Callable[[str], bool]:
        """Whether a hook of any rank may read what an evaluating step returned; all ranks call."""
        steps = "validation_step", "test_step"
        own = {step for step in steps if _lightning.reads_outputs(self._trainer, step)}
        found = self._members.gather(own, "asking which hooks read what steps return")
        return lambda step: any(step in one for one in found)

    def _let_steps_see(self, scaled: Callable[[Tensor], Tensor] | None) -> None:
        split, trainer = self.split, self._trainer
        split.scaled = scaled or split.scaled
        split.beside = lambda: beside_module(trainer)
        split.looks_again = getattr(trainer.strategy, "asked", False)

    # What its batches did

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last training step, `None` before the first."""
        return self.run.last_plan

    @property
    def batch_size(self) -> int | None:
        """Samples in the last training batch; `None` where the batch does not tell."""
        return self.run.batch_size

    # Batches

    def training_batch(self, args: Sequence[Any], *, stepping: bool) -> Batch | UncutBatch:
        """One that is trained on; its gradients are set aside.

        Args:
            args: Of `training_step`.
            stepping: Whether the optimizer steps on it.
        """
        trainer = self._trainer
        self.begin_batch()
        self.steps.split.as_one.epoch = trainer.current_epoch
        if self._trains_whole:
            self._uncut_begins()
            return self.lockstep.batch("training_step", args)
        self.reads.bring("training_step", self._first_part("training_step", args))
        of_run = trainer.fit_loop.total_batch_idx  # epochs may be counted anew by a resume
        batch = Batch(self.steps, "training_step", args, (of_run,), trainer.accumulate_grad_batches)

        @contextmanager
        def around() -> Iterator[None]:
            is_read = self.split.known.reads_gradients("training_step")
            around = self.gradients.of_batch(trainer, stepping=stepping, is_read=is_read)
            with around, self.meeting.aside():
                yield
                self.hooks.show()

        batch.around, batch.around_backwards = around, self.gradients.of_backwards
        batch.scale_gradients = self.gradients.scale
        batch.accumulates = lambda: trainer.accumulate_grad_batches
        return batch

    def evaluated_batch(self, step: str, args: Sequence[Any], batch_idx: int) -> Batch | UncutBatch:
        """One of validation, test or predict.

        Args:
            step: Name of the user's method.
            args: Its arguments.
            batch_idx: Of the batch.
        """
        trainer = self._trainer
        self.begin_batch()
        self.steps.split.as_one.epoch = trainer.current_epoch
        first = self._first_part(step, args)
        uncut = self.lockstep.takes(step, first)
        aside = nullcontext if uncut else self.meeting.aside
        batch: Batch | UncutBatch = Batch(self.steps, step, args, (trainer.current_epoch, batch_idx))
        if uncut:
            self._uncut_begins()
            batch = self.lockstep.batch(step, args)
        else:
            self.reads.bring(step, first)

        @contextmanager
        def around() -> Iterator[None]:
            with aside():
                yield
            self.meeting.sources.forget()  # weights that a step writes may have other memory now
            if trainer.received_sigterm and trainer.predicting:  # where Lightning does not look
                raise SIGTERMException

        batch.around = around
        return batch

    def _first_part(self, step: str, args: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """Gives the arguments of a batch's first micro-batch."""
        return lambda: self.steps.cut(step, args).args[0]

    def _uncut_begins(self) -> None:
        """A batch comes whose step runs whole, and may leave something in the units that it calls."""
        self.split.begun += 1

    def put_gradients_back(
        self, loss: Tensor | None = None, run: Callable[[Tensor], None] | None = None, *, stepping: bool
    ) -> None:
        """Give `.grad` what the step made; before the optimizer steps, average over replicas.

        Args:
            loss: Of the batch, None if it has none.
            run: What Lightning does with the loss: calls the module's `backward`, which counts where it is
                the project's own.
            stepping: Whether the optimizer steps on this batch.
        """
        if loss is not None and run is not None and self.gradients.calls_backward:
            with self.meeting.aside():
                made = self.gradients.as_of(loss)
            with self.in_hook():
                run(made)
        with self.meeting.aside():
            self.gradients.put_back()
        self.meeting.changed()
        if stepping:
            with self.meeting.aside():
                self.gradients.average()
            self.has_stepped = True

    def after_backward(self) -> None:
        """One of manual optimization has given parameters their gradients: average over replicas."""
        with self.meeting.aside():
            self.hooks.show(by_hand=True)
            self.gradients.average()
        self.has_stepped = True
        self.meeting.changed()

    def clip(self, parameters: Any, max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip gradients by their norm over all stages; tied parameters count once."""
        with self.meeting.aside():
            return self.gradients.clip(
                parameters, max_norm, self._device, error_if_nonfinite=error_if_nonfinite
            )

    # The user's hooks

    def in_hook(self) -> AbstractContextManager[None]:
        """Around code of the user that sees the module: what needs several stages is completed."""
        return self.meeting.hook()

    def aside(self) -> AbstractContextManager[None]:
        """Inside a hook: around what is no code of the user's, such as a save that it asks for."""
        self.meet()
        return self.meeting.aside()

    def meet(self) -> None:
        """Inside a hook, before all ranks do something together: those that call units first are answered."""
        self.units.meet()

    def complete(self, value: Any) -> Any:
        """A value, as far as a hook made it of other stages' tensors."""
        return self.meeting.whole(value)

    def disconnect(self) -> None:
        """Undo what was replaced for hooks and steps."""
        undo, self._undo = self._undo, []
        all_undone(undo)()
