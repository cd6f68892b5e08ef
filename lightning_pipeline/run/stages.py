"""What a run has once its module is split: this rank's stages, and all that works on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint.contents import Owns, names_by_identity, owned_by
from lightning_pipeline.executor import Executor
from lightning_pipeline.hooks import (
    Beside,
    HooksElsewhere,
    LockSteps,
    LogRecorder,
    OwnParts,
    Reads,
    ReportChannel,
    UncutBatch,
    exchange,
    give_gradients,
    give_states,
    gradients_of,
    is_torchs,
    join_scaler,
    refuse_strangers,
    refuse_unserved,
    states_of,
)
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.patching import all_undone
from lightning_pipeline.run.batch import (
    Batch,
    Gradients,
    Plans,
    StagesMeter,
    Steps,
    reordering_by,
    split_arguments,
    watch_memory,
)
from lightning_pipeline.run.members import Members
from lightning_pipeline.run.served import ServedHooks
from lightning_pipeline.run.setup import (
    Cut,
    beside_module,
    held_states,
    kept_by_units,
    loggers_set_aside,
    make_whole,
    move,
    start_equal,
)
from lightning_pipeline.run.stages_run import StagesRun
from lightning_pipeline.schedules import Plan
from lightning_pipeline.settings import Settings


class Stages:
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
        split: This rank's part of the module.
        executor: Runs plans on it.
        gradients: What batches make of them.
        hooks: On gradients, where one rank alone has registered them.
        meeting: Completes values of several stages in the user's hooks.
        run: What is known of it, and what its steps did.
        reads: Brings to stages what steps read there.
        steps: What its batches have in common.
    """

    def __init__(
        self, members: Members, settings: Settings, placement: Plan, trainer: Trainer, cut: Cut,
        split: SplitModel, says: str,
    ) -> None:  # fmt: skip
        self.split, self.table = split, cut.table
        self.says = "\n".join(filter(None, [says, members.groups.ways]))
        self._members, self._settings, self._placement = members, settings, placement
        self._trainer, self._module = trainer, trainer.lightning_module
        self._partition = cut.partition
        self._here = placement.stages_of(members.groups.rank)
        self._device: torch.device = trainer.strategy.root_device
        self._undo: list[Callable[[], Any]] = []

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
        self._let_steps_see(recorder, scaled)
        if groups.numbering.replicas == 1:
            _lightning.silence_sync_dist_advice()
        stages = {index: split.executed(index) for index in self._here}
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
        groups.share((shared.stages for shared in split.shared), self._placement)
        self.gradients = Gradients(split, groups, members.failure, self._placement)
        self.hooks = self._hooks_elsewhere()
        served = ServedHooks(
            self._module, split, split.sinks_to, members, self._placement, trainer, self._device,
        )  # fmt: skip
        self.meeting, self.units, members.aside = served.meeting, served.units, self.aside
        self._undo += [_lightning.around_hooks(trainer, self.meeting.hook, members.gather), served.restore]
        self._equal: list[Tensor] = []
        self._start_equal()

        def ends(logged: bool) -> bool:
            raised, others = end_batch(logged, self.hooks.has_changed())
            if others:
                self.hooks.agree()
            return raised

        metrics = served.serve(ends)
        self.lockstep = LockSteps(
            self._module, split.known.refusal, self.meeting, metrics, members.replica, members.from_last,
            split.forward_context, keeps=split.has_last_stage,
        )  # fmt: skip
        self.reads = Reads(split, self.meeting, members.gather, self._spread)
        reports = ReportChannel(members.from_last, self._device, groups.pipeline)
        looks = self._settings.on_nonfinite != "ignore" and self._module.automatic_optimization
        if looks and trainer.training and scaled is None:
            self.gradients.look(reports)  # a gradient scaler decides by itself
        reordering = reordering_by(
            self._settings.schedule, self._partition, members.gather_for("measuring the stages"),
            members.from_zero.share,
        )  # fmt: skip
        self.steps = Steps(
            self._module, split, self.executor, self.run, plans, reports, recorder, metrics, groups.replica,
            members.from_last, self._settings.loss_weighting, self._settings.loss_over_batch,
            num_microbatches, at_least, reordering,
        )  # fmt: skip
        run = self.run
        run.memory = StagesMeter(
            split, split.cut, self.executor, split.waiting, lambda: run.last_plan,
            lambda: trainer.optimizers, self.gradients.aside.held, self._device,
        )  # fmt: skip
        watch_memory(run.memory, run, members.failure)

    def _hooks_elsewhere(self) -> HooksElsewhere:
        members, split = self._members, self.split

        def holders(name: str) -> list[int]:
            return [self._placement.rank_of(stage) for stage in split.stages_of(name)]

        def send(what: str, tensor: Tensor, rank: int) -> None:
            members.replica.broadcast(what, tensor, members.ranks[rank], members.groups.pipeline)

        originals = {id(made): tensor for tensor, made in split.stand_ins.items()}
        return HooksElsewhere(
            self._module, originals, holders, members.gather, send, members.groups.rank,
            self._placement.num_ranks,
            {name: (part, self._placement.rank_of(stage)) for name, part, stage in split.modules_run()},
        )  # fmt: skip

    def _let_steps_see(self, recorder: LogRecorder, scaled: Callable[[Tensor], Tensor] | None) -> None:
        split, trainer = self.split, self._trainer
        recorder.part_of, split.told.of_whole = split.part, recorder.log_of_whole
        split.told.of_whole_begins = recorder.whole_begins
        split.scaled = scaled or split.scaled
        split.beside = lambda: beside_module(trainer)
        split.looks_again = getattr(trainer.strategy, "asked", False)
        split.set_aside = lambda: loggers_set_aside(trainer)

    def _start_equal(self) -> None:
        """Give what is new here the same values on all replicas and stages that have it."""
        known = set(map(id, self._equal))
        new = [tensor for tensor in held_states(self._module).values() if id(tensor) not in known]
        here = set(map(id, new))
        shared = [one for one in self.split.shared if one.parameter is None or id(one.parameter) in here]
        start_equal(new, shared, self._members.groups, self._placement)
        self._equal = list(held_states(self._module).values())

    def take_in(self) -> None:
        """Before a batch or a checkpoint: what hooks have added goes to its stages; all ranks call."""
        split, groups = self.split, self._members.groups
        if not split.take_in():
            return
        exchange(self._trainer.optimizers, {id(tensor): made for tensor, made in split.stand_ins.items()})
        groups.share((shared.stages for shared in split.shared), self._placement)
        self._start_equal()
        self.gradients.list_anew()
        self.hooks = self._hooks_elsewhere()

    def _spread(self, wider: Mapping[str, Set[int]]) -> None:
        """Give more stages copies of parameters, with what optimizers know of them; all ranks call."""
        split, groups, optimizers = self.split, self._members.groups, self._trainer.optimizers
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        asked = {key: name for key, name in names.items() if name in wider}
        own = states_of(optimizers, asked), gradients_of(self._module, asked)
        made = split.spread(wider)
        exchange(optimizers, made)
        groups.share((shared.stages for shared in split.shared), self._placement)
        start_equal((), [one for one in split.shared if one.name in wider], groups, self._placement)
        self._equal = list(held_states(self._module).values())
        told = self._members.gather(own, "sharing what optimizers know of parameters")
        copies = {names[key]: parameter for key, parameter in made.items()}
        give_states(optimizers, copies, [states for states, _ in told])
        give_gradients(copies, [found for _, found in told])
        self.gradients.list_anew()
        self.hooks = self._hooks_elsewhere()

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers list the whole model, and step over what this rank holds.

        Raises:
            ConfigurationError: One that cannot be served.
        """
        refuse_unserved(optimizers)
        exchange(optimizers, {id(tensor): made for tensor, made in self.split.stand_ins.items()})
        if self._module.automatic_optimization:  # else every rank runs the step whole
            self._undo.append(refuse_strangers(optimizers, self._module))
        self.own_parts = OwnParts(optimizers)

        def whole() -> None:
            originals = {id(made): tensor for tensor, made in self.split.stand_ins.items()}
            exchange(optimizers, originals)

        self._undo += [whole, self.own_parts.remove]

    def to_device(self, device: torch.device) -> None:
        """Move this rank's parameters, buffers and metrics."""
        if device.type != "cpu":
            move(self._module, device)

    # What it holds

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last training step, `None` before the first."""
        return self.run.last_plan

    @property
    def batch_size(self) -> int | None:
        """Samples in the last training batch; `None` where the batch does not tell."""
        return self.run.batch_size

    def names(self) -> dict[int, str]:
        """Names of this rank's parameters in the whole module, by `id`."""
        return names_by_identity(self.split.owned_parameters())

    def written_names(self) -> dict[int, str]:
        """Those whose optimizer state this rank writes: of a shared parameter only its owner does."""
        elsewhere = self.gradients.counted_elsewhere
        return {identity: name for identity, name in self.names().items() if identity not in elsewhere}

    def own_state(self) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint: each name is owned by one stage."""
        return self.split.owned_states()

    def owns(self) -> Owns:
        """Whether this rank has the true state of a module that is neither parameter nor buffer."""
        return owned_by(self._partition, self._here)

    def units_by_stage(self) -> list[list[str]]:
        """Names of the units of each stage."""
        cut = self._partition
        units = [unit.name for unit in cut.trace.units]
        return [[units[number] for number in cut.units_of(stage)] for stage in range(cut.num_stages)]

    def reseed(self, seed: int) -> None:
        """Draw from other random numbers from now on."""
        self.split.seed = seed

    # Batches

    def training_batch(self, args: Sequence[Any], *, stepping: bool) -> Batch | UncutBatch:
        """One that is trained on; its gradients are set aside.

        Args:
            args: Of `training_step`.
            stepping: Whether the optimizer steps on it.
        """
        trainer = self._trainer
        self.take_in()
        if not self._module.automatic_optimization:
            self._uncut_begins()
            return self.lockstep.batch("training_step", args)
        self.reads.bring("training_step", self._first_part(args))
        of_run = trainer.fit_loop.total_batch_idx  # epochs may be counted anew by a resume
        batch = Batch(self.steps, "training_step", args, (of_run,), trainer.accumulate_grad_batches)

        @contextmanager
        def around() -> Iterator[None]:
            with self.gradients.of_batch(trainer, stepping=stepping), self.meeting.aside():
                yield
                self.hooks.show()

        batch.around, batch.around_backwards = around, self.gradients.of_backwards
        return batch

    def evaluated_batch(self, step: str, args: Sequence[Any], batch_idx: int) -> Batch | UncutBatch:
        """One of validation, test or predict.

        Args:
            step: Name of the user's method.
            args: Its arguments.
            batch_idx: Of the batch.
        """
        trainer = self._trainer
        self.take_in()
        first = self._first_part(args)
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
            if trainer.received_sigterm and trainer.predicting:  # where Lightning does not look
                raise SIGTERMException

        batch.around = around
        return batch

    def _first_part(self, args: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """Gives the arguments of a batch's first micro-batch."""
        return lambda: split_arguments(self._module, args, self.steps.num_microbatches).args[0]

    def _uncut_begins(self) -> None:
        """A batch comes whose step runs whole, and may leave something in the units that it calls."""
        self.split.begun += 1

    def put_gradients_back(self, *, stepping: bool) -> None:
        """Give `.grad` what the step made; before the optimizer steps, average over replicas.

        Args:
            stepping: Whether the optimizer steps on this batch.
        """
        with self.meeting.aside():
            self.gradients.put_back()
        self.meeting.changed()
        if stepping:
            with self.meeting.aside():
                self.gradients.average()

    def after_backward(self) -> None:
        """One of manual optimization has given parameters their gradients: average over replicas."""
        with self.meeting.aside():
            self.hooks.show(by_hand=True)
            self.gradients.average()
        self.meeting.changed()

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Around an optimizer's step. torch's own go over each parameter by itself; what others do is seen.

        Args:
            optimizer: Whose step follows. Hooks that it calls by its closure are hooks again.
        """
        try:
            with self.meeting.aside() if is_torchs(optimizer) else self.meeting.hook():
                yield
                self.own_parts.put_back()
                self.own_parts.show_states(optimizer, self.split, self._members.gather)
        finally:
            self.own_parts.put_back()
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

    # The end

    def disconnect(self) -> None:
        """Undo what was replaced for hooks and steps."""
        undo, self._undo = self._undo, []
        all_undone(undo)()

    def join(self, *, failed: bool, staged: bool) -> None:
        """The module becomes whole, on CPU, on the ranks that `gather_weights` names.

        On the others what they did not hold is on the meta device. After an exception the other stages'
        weights are not to be had; the module then keeps empty tensors for them, which fail loudly when used.

        Args:
            failed: Whether there was one.
            staged: Whether ranks built their own stages only.
        """
        if failed:
            self.split.restore()
            return
        self.split.mode.forget()
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        from_last = self._members.from_last
        try:
            left, _ = from_last.share(self.split.left_so_far, "gathering what steps left on the last stage")
            how = self._settings.gather_weights
            kept = kept_by_units(self.split.in_units, self._members.replica, how, staged=staged)
            came = make_whole(
                self._module, callbacks, self.split, self.owns(), self._members.replica,
                how, staged=staged,
            )  # fmt: skip
        except BaseException:  # another rank has failed
            self.split.restore()
            raise
        self.split.restore(came, on_meta=True)
        if not from_last.is_source:
            self.split.take(left)
        self.split.in_units.take_last(kept)


def split_module(
    module: LightningModule,
    cut: Cut,
    stages: tuple[int, ...],
    recorder: LogRecorder,
    forward_context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    seed: int,
    trainer: Trainer,
    *,
    loss_over_batch: bool = False,
) -> SplitModel:
    """Keep this rank's stages of a module.

    Args:
        module: Whole.
        cut: The same on every rank.
        stages: This rank's.
        recorder: Where `self.log` goes during a step.
        forward_context: The precision plugin's.
        device: Of this rank.
        seed: Of the random numbers in steps; the same on every rank.
        trainer: Whose data module, callbacks and so on a step may change.
        loss_over_batch: Of the strategy.
    """
    sinks = {"log": recorder.log, "log_dict": recorder.log_dict}
    return SplitModel(
        module, cut.partition, stages=list(stages), sinks=sinks, forward_context=forward_context, seed=seed,
        later=cut.later, device=device,
        others=Beside(trainer).owners, loss_over_batch=loss_over_batch,
    )  # fmt: skip
