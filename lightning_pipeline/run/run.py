"""What exists between the start and the end of one run of a Trainer: groups, stages, executor."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import Checkpoints, options_of
from lightning_pipeline.checkpoint.contents import Owns, names_by_identity, owned_by
from lightning_pipeline.data import EarlyLoaders, Feed, Position
from lightning_pipeline.errors import ConfigurationError, NonFiniteError, SplitError, StageFailedError
from lightning_pipeline.executor import Executor
from lightning_pipeline.hooks import (
    AgreedGradients,
    EpochEndHooks,
    GradientHooks,
    HookLogs,
    LogRecorder,
    OwnParts,
    ReportChannel,
    SetAside,
    SharedMetrics,
    clip_by_norm,
    exchange,
    is_torchs,
    join_scaler,
    refuse_unserved,
    zeroed_unseen,
)
from lightning_pipeline.model.construction import Construction
from lightning_pipeline.model.cut import StageTable
from lightning_pipeline.model.replay import SplitModel
from lightning_pipeline.ranks import (
    Board,
    Company,
    Failure,
    Groups,
    Outlet,
    Within,
    average_gradients,
    sum_shared,
)
from lightning_pipeline.run.headline import headline, too_small
from lightning_pipeline.run.in_step import KeepTogether, ReducesLogs
from lightning_pipeline.run.out_of_memory import watch_memory
from lightning_pipeline.run.replan import Reordering
from lightning_pipeline.run.setup import (
    Cut,
    as_the_loop_will,
    beside_module,
    choose_cut,
    held_states,
    hooks_undone,
    loggers_set_aside,
    make_whole,
    materialize,
    move,
    seed_of_run,
    split_module,
    start_equal,
    trace_later,
)
from lightning_pipeline.run.step import Plans, StepRunner, samples_of, split_arguments, trains_batch_norm
from lightning_pipeline.run.summary import summarize_before_split
from lightning_pipeline.schedules import Auto, Plan
from lightning_pipeline.settings import Settings


class Pipeline:
    """One run's groups, data, stages and executor. All ranks make and use one together.

    Args:
        settings: Of the strategy.
        placement: Which pipeline rank holds which stage.
        backend: Of the collectives.
        device: Of this rank.
        within: Does what all ranks do together before somebody watches over waits.
    """

    executor: Executor
    split: SplitModel
    own_parts: OwnParts
    _runner: StepRunner
    _cut: Cut

    def __init__(
        self, settings: Settings, placement: Plan, backend: str, device: torch.device, within: Within
    ) -> None:
        self._settings, self._placement, self._device = settings, placement, device
        self.groups = groups = Groups(
            placement, replicas=dist.get_world_size() // placement.num_ranks, backend=backend,
            init_timeout=settings.init_timeout, step_timeout=settings.step_timeout,
            hook_timeout=settings.hook_timeout,
            edge_backend=settings.edge_backend(device, backend), device=device, within=within,
        )  # fmt: skip
        self.failure = Failure(groups, asked=SIGTERMException)
        self.world = Company(groups.control, self.failure, groups.global_rank)
        self.replica = Company(groups.pipeline_control, self.failure, groups.global_rank)
        self._ranks = groups.numbering.pipelines()[groups.replica]
        self._stages = placement.stages_of(groups.rank)
        self._plans = Plans(settings.schedule, placement.num_ranks)
        self._from_zero = Outlet(self.world, 0, groups.global_rank == 0)
        self._from_last = self._outlet(placement.rank_of(placement.num_stages - 1))
        self.feed = Feed(
            groups.replica, self._ranks, self._gather_for("comparing batches"), self._from_last, settings.data
        )
        options = options_of(settings, placement.num_stages)
        checkpoints = partial(Checkpoints, options, groups.numbering, groups.store, groups.lookout)
        self.checkpoints: Checkpoints = within("making groups", checkpoints)
        self._set_aside = SetAside()
        self._undo: list[Any] = []
        self._at_last: list[Any] = []
        self._failed = self._is_split = self._staged = False
        self._at_least = 1
        self._together: KeepTogether | None = None

    def _outlet(self, rank: int) -> Outlet:
        return Outlet(self.replica, self._ranks[rank], rank == self.groups.rank)

    # Setting up

    def at_end(self, undo: Callable[[], Any]) -> None:
        """Call something when the run ends, before what was added earlier."""
        self._undo.append(undo)

    def at_last(self, undo: Callable[[], Any]) -> None:
        """Call something after the user's last hooks, which come when the run has ended."""
        self._at_last.append(undo)

    @property
    def from_zero(self) -> Outlet:
        """From global rank 0 to all ranks."""
        return self._from_zero

    def split_module(self, trainer: Trainer, plugin: Precision, built: Construction | None = None) -> None:
        """Look at a first batch, cut the module, and keep this rank's stages.

        Args:
            trainer: In its setup; with no data the module stays whole, for nothing will run.
            plugin: Whose context the forwards run in.
            built: The weights that the module has not yet.
        """
        self._trainer, self._module, settings = trainer, trainer.lightning_module, self._settings
        seed = seed_of_run(self._from_zero)
        self.feed.seed = seed
        self.seed, self.position = seed, Position(trainer)
        self.order = [name for name, _ in self._module.named_parameters()]
        together = KeepTogether(self, self._from_last, self.position.epoch_starts, self.checkpoints)
        together.equal_random_states()
        self._undo.append(together.watch_signals(trainer))
        self._together = together
        early = EarlyLoaders(trainer, self.feed, together.equal_random_states, lambda: hooks_undone(trainer))
        self._undo.append(early.restore)
        first = early.first_arguments()
        if trainer.training:
            _lightning.count_replicas_as_devices(trainer, self._placement.num_ranks)
            self._undo += [self.position.install(), summarize_before_split(trainer)]
            self._undo.append(_lightning.skip_without_loss(trainer))
            self._add_callbacks(trainer, together)
        if first is None:
            return
        step, args = first
        number = self._choose_number(args)
        parts = split_arguments(self._module, args, number)
        self._says = headline(
            self._plans.plan(number, forward_only=not trainer.training), settings.schedule,
            batch_size=parts.batch_size, replicas=self.groups.numbering.replicas,
            chosen=settings.num_microbatches == "auto", trains=trainer.training,
        )  # fmt: skip
        context = plugin.forward_context
        self._undo.append(lambda: _lightning.claim_device(self._module, torch.device("cpu")))
        _lightning.claim_device(self._module, self._device)
        with as_the_loop_will(trainer, step):
            self._cut = choose_cut(
                self._module, step, parts.args[0], self._placement.num_stages, settings, context,
                self._device, self._from_zero, self.agreed, built, trainer,
            )  # fmt: skip
        later = early.later_arguments(step)
        if later is not None:
            parts = split_arguments(self._module, later[1], number)
            with as_the_loop_will(trainer, later[0]):
                self._cut = self.agreed(
                    lambda: trace_later(
                        self._module, self._cut, later[0], parts.args[0], context, self._device, trainer
                    )
                )
        self._staged = bool(built)
        materialize(self._module, self._cut, self._stages, self.world, self.replica, built)
        recorder = LogRecorder(self._module)
        self.split = self.agreed(
            lambda: split_module(
                self._module, self._cut, self._stages, recorder, context, self._device, seed, trainer
            )
        )
        recorder.part_of, self.split.told.of_whole = self.split.part, recorder.log_of_whole
        self._scaled = join_scaler(plugin, self.groups.pipeline)
        self.split.scaled = self._scaled or self.split.scaled
        self.split.beside = lambda: beside_module(trainer)
        self.split.looks_again = getattr(trainer.strategy, "asked", False)
        self.split.set_aside = lambda: loggers_set_aside(trainer)
        self._is_split = True
        if self.groups.numbering.replicas == 1:
            _lightning.silence_sync_dist_advice()
        self._connect(recorder, number)

    def _add_callbacks(self, trainer: Trainer, last: Callback) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        added: list[Callback] = [last]
        if self.groups.numbering.replicas > 1:
            added.append(ReducesLogs())
        callbacks[:] = [*added[1:], *callbacks, last]
        self._undo += [partial(callbacks.remove, one) for one in added]

    def _choose_number(self, args: Sequence[Any]) -> int:
        if self._settings.num_microbatches != "auto":
            return self._settings.num_microbatches
        self._at_least = 1 + trains_batch_norm(self._module)

        def choose() -> int:
            return self._plans.choose_number(samples_of(self._module, args), at_least=self._at_least)

        return int(self._from_zero.share(choose))

    def _connect(self, recorder: LogRecorder, number: int) -> None:
        stages = {index: self.split.stage(index) for index in self._stages}
        self.executor = Executor(stages, self.groups, device=self._device, failure=self.failure)
        self._parameters = [parameter for _, parameter in self.split.owned_parameters()]
        self.groups.share((shared.stages for shared in self.split.shared), self._placement)
        self._not_counted = {
            id(shared.parameter) for shared in self.split.shared
            if shared.parameter is not None and self._placement.rank_of(shared.stages[0]) != self.groups.rank
        }  # fmt: skip
        placement = self._placement
        self.meeting = self.split.meeting(
            placement.rank_of, placement.num_ranks, self._meet, lambda: self._trainer.optimizers
        )
        self._undo.append(_lightning.around_hooks(self._trainer, self.meeting.hook))
        start_equal(held_states(self._module).values(), self.split.shared, self.groups, self._placement)
        board = Board(
            self.groups.values, self.groups.waits, self.groups.replica, self._from_last.source,
            self.groups.host, self.failure.watch,
        )  # fmt: skip
        metrics = SharedMetrics(self._module, self._from_last, board, self.groups.data_parallel)
        epoch_end = EpochEndHooks(self._module, self.split, self._from_last, metrics, self.meeting.aside)
        logs = HookLogs(
            self._trainer, self._gather_for("logging in a hook"), self._end_batch, self.meeting.later
        )
        self._undo += [metrics.restore, epoch_end.restore, logs.restore]
        reports = ReportChannel(self._from_last, self._device, self.groups.pipeline)
        self._watch_gradients(reports)
        self._runner = StepRunner(
            self._module, self.split, self.executor, self._plans, reports, recorder, metrics,
            self.groups.replica, self._from_last, self._settings.loss_weighting,
        )  # fmt: skip
        self._runner.num_microbatches, self._runner.at_least = number, self._at_least
        self._gradient_hooks = GradientHooks(self._parameters)
        self._runner.around_backwards = self._around_backwards
        self.memory = watch_memory(
            self._trainer, self.split, self.executor, self._runner, self._plans, self._set_aside
        )
        if isinstance(self._settings.schedule, Auto):
            self._runner.reordering = Reordering(
                self._settings.schedule,
                self.split.cut,
                self._gather_for("measuring the stages"),
                self._from_zero.share,
            )

    def _watch_gradients(self, reports: ReportChannel) -> None:
        """Where steps depend on it, tell all ranks of gradients that are not finite, with the reports."""
        self._finite: AgreedGradients | None = None
        if self._settings.on_nonfinite == "ignore" or not self._trainer.training or self._scaled:
            return  # a gradient scaler decides by itself
        groups = self.groups
        finite = self._finite = AgreedGradients(
            self.split.parameter_names(), self.split.stages_of, self.split.owned_parameters(), groups.replica,
            groups.numbering.replicas, groups.numbering.global_rank,
        )  # fmt: skip
        places = dist.get_process_group_ranks(groups.pipeline)
        reports.numbers = lambda: finite.own(self._set_aside.totals())
        reports.told = lambda found: finite.of_replica([found[places.index(rank)] for rank in self._ranks])

    def agreed(self, work: Callable[[], Any]) -> Any:
        """Do local work on every rank of the world; when one fails, all raise."""
        return self.world.all_or_none("splitting the module", work)

    def to_device(self, device: torch.device) -> None:
        """Move this rank's parameters, buffers and metrics."""
        if device.type != "cpu" and self._is_split:
            move(self._module, device)

    # What it holds

    @property
    def table(self) -> StageTable | None:
        """The stages; `None` when there was no data to split the module with."""
        return self._cut.table if self._is_split else None

    @property
    def says(self) -> str:
        """What the run does, in a line; empty when there was no data."""
        return self._says if self._is_split else ""

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last training step, `None` before the first."""
        return self._runner.last_plan if self._is_split else None

    @property
    def batch_size(self) -> int | None:
        """Samples in the last training batch; `None` where the batch does not tell."""
        return self._runner.batch_size if self._is_split else None

    def parameters(self) -> list[Tensor]:
        """This rank's parameters, tied ones once."""
        return list(self._parameters) if self._is_split else list(self._module.parameters())

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers list the whole model, and step over what this rank holds.

        Raises:
            ConfigurationError: One that cannot be served.
        """
        refuse_unserved(optimizers)
        if self._is_split:
            exchange(optimizers, {id(tensor): made for tensor, made in self.split.stand_ins.items()})
            self.own_parts = OwnParts(optimizers)
            originals = {id(made): tensor for tensor, made in self.split.stand_ins.items()}
            self._undo += [lambda: exchange(optimizers, originals), self.own_parts.remove]

    def names(self) -> dict[int, str]:
        """Names of this rank's parameters in the whole module, by `id`."""
        named = self.split.owned_parameters() if self._is_split else self._module.named_parameters()
        return names_by_identity(named)

    def written_names(self) -> dict[int, str]:
        """Those whose optimizer state this rank writes: of a shared parameter only its owner does."""
        shared = self._not_counted if self._is_split else set()
        return {identity: name for identity, name in self.names().items() if identity not in shared}

    def own_state(self) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint: each name is owned by one stage."""
        return self.split.owned_states() if self._is_split else held_states(self._module)

    def owns(self) -> Owns:
        """Whether this rank has the true state of a module that is neither parameter nor buffer."""
        return owned_by(self._cut.partition if self._is_split else None, self._stages)

    def units_by_stage(self) -> list[list[str]]:
        """Names of the units of each stage; none where the module is not split."""
        if not self._is_split:
            return []
        cut = self._cut.partition
        units = [unit.name for unit in cut.trace.units]
        return [[units[number] for number in cut.units_of(stage)] for stage in range(cut.num_stages)]

    def resume(self, stood: Mapping[str, Any] | None) -> None:
        """Go on where the saved run stood in its data and random numbers; `None`: that is not known."""
        self.position.resume(stood)
        if stood is not None:
            self.seed = self.feed.seed = self.split.seed = stood["seed"]
            self.feed.moved = stood["moved"]

    # Steps

    def train(self, args: Sequence[Any], *, stepping: bool) -> dict[str, Any] | None:
        """Run a training step; its gradients are set aside. `None` where it has no loss.

        Args:
            args: Of `training_step`.
            stepping: Whether the optimizer steps on this batch.
        """
        self.checkpoints.check()
        if self._finite is not None:
            self._finite.counts = stepping
        loop = self._trainer.fit_loop
        batch_idx, of_run = loop.batch_idx, loop.total_batch_idx  # epochs may be counted anew by a resume
        self.feed.check(args[0], batch_idx, "training_step")
        unseen = zeroed_unseen(self._trainer, batch_idx)
        self._set_aside.begin(self._parameters, drop=unseen)
        if unseen:
            self.split.note_gradients(False)
        try:
            with self.meeting.aside():
                outputs = self._runner.train(args, (of_run,), self._trainer.accumulate_grad_batches)
        except BaseException:
            self._set_aside.cancel()
            raise
        self._set_aside.end()
        return outputs

    @contextmanager
    def _around_backwards(self) -> Iterator[None]:
        """Around the plan of a training step: the user's hooks on gradients see those of the whole batch."""
        with self._gradient_hooks.put_off():
            yield
        if self.split.shared:
            with self.failure.watch("adding up gradients of shared parameters", self.groups.control):
                copies = [(tuple(shared.stages), shared.parameter) for shared in self.split.shared]
                sum_shared(copies, partial(self.groups.shared, placement=self._placement))
        self._gradient_hooks.change()

    def evaluate(self, step: str, args: Sequence[Any]) -> Any:
        """Run a step of validation, test or predict."""
        batch_idx = _lightning.evaluation_loop(self._trainer).batch_progress.current.ready - 1
        self.feed.check(args[0], batch_idx, step)
        output = self._runner.evaluate(step, args, (self._trainer.current_epoch, batch_idx))
        if self._trainer.received_sigterm and self._trainer.predicting:  # where Lightning does not look
            raise SIGTERMException
        return output

    def _end_batch(self, logged: bool) -> bool:
        assert self._together is not None, "made when the module was split"
        with self.meeting.aside():
            return self._together.end_batch(self._trainer, logged)

    def aside(self) -> AbstractContextManager[None]:
        """Inside a hook: around what is no code of the user's, such as a save that it asks for."""
        return self.meeting.aside() if hasattr(self, "meeting") else nullcontext()

    def in_hook(self) -> AbstractContextManager[None]:
        """Around code of the user that sees the module: what needs several stages is completed."""
        return self.meeting.hook() if self._is_split else nullcontext()

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
                self.own_parts.show_states(optimizer, self.split, self.gather)
        finally:
            self.own_parts.put_back()
            self.meeting.changed()

    def put_gradients_back(self, *, stepping: bool) -> None:
        """Give `.grad` what the step made; before the optimizer steps, average and sum over ranks.

        Args:
            stepping: Whether the optimizer steps on this batch.
        """
        self._set_aside.put_back()
        self._gradient_hooks.after()
        self.split.note_gradients(True)
        self.meeting.changed()
        if stepping:
            with self.meeting.aside(), self.failure.watch("averaging gradients", self.groups.control):
                told = average_gradients(
                    self._parameters, self.groups.data_parallel,
                    numbers=() if self._finite is None else self._finite.numbers,
                )  # fmt: skip
                if self._finite is not None:
                    self._finite.of_all(told)

    def not_finite(self) -> list[str]:
        """Gradients that are inf or nan before a step, in words, the same on every rank."""
        return [] if self._finite is None else self._finite.found()

    def clip(self, parameters: Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip gradients by their norm over all stages; tied parameters count once."""
        with self.meeting.aside(), self.failure.watch("clipping gradients", self.groups.pipeline):
            return clip_by_norm(
                parameters, max_norm, elsewhere=self._not_counted, groups=[self.groups.pipeline],
                device=self._device, error_if_nonfinite=error_if_nonfinite,
            )  # fmt: skip

    # Collectives

    def gather(self, value: Any, what: str = "gathering from all stages") -> list[Any]:
        """An object of every rank of this replica, by pipeline rank."""
        with self.aside():
            return self._by_rank(self.replica.gather(what, value))

    def _meet(self, what: str, value: Any) -> list[Any]:
        """In a group of their own: a rank that reads alone meets nothing else there."""
        company = Company(self.groups.meetings, self.failure, self.groups.global_rank)
        return self._by_rank(company.gather(what, value))

    def _by_rank(self, found: Mapping[int, Any]) -> list[Any]:
        return [found[rank] for rank in self._ranks]

    def _gather_for(self, what: str) -> Callable[[Any], list[Any]]:
        return lambda value: self.gather(value, what)

    def reduce(self, value: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor over the replicas, or the group that was asked for."""
        group = self.groups.data_parallel if group is None else group
        if self._is_split:
            value = self.meeting.whole(value)  # as far as a hook made it of other stages' tensors
        if not isinstance(value, Tensor) or group is None:
            return value
        return _lightning.reduce_over(value, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        """Gather over the replicas; with one replica the tensor as it is, as on one device."""
        if group is None or group is dist.group.WORLD:
            group = self.groups.data_parallel
        tensor = self.meeting.whole(tensor) if self._is_split else tensor
        if group is None or group.size() == 1:
            return tensor
        return _lightning.gather_over(tensor, group, sync_grads)

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag whether any rank of the world raised it."""
        return self.world.any_of("asking all ranks", *flags)

    # The end

    @property
    def ends_together(self) -> bool:
        """Whether all ranks end at this point, by a SIGTERM or an exception of all: they still answer."""
        return self._together is not None and self._together.ending

    def fail(self, exception: BaseException) -> None:
        """The run ends with an exception: tell the other ranks, so that none waits for this one.

        Args:
            exception: Gets a note when another rank failed first.
        """
        together = self._together if self._is_split else None
        if self.ends_together or self._failed or (together is not None and together.all_raise(exception)):
            return
        self._failed = True
        alike = isinstance(exception, ConfigurationError | SplitError) and not self._is_split
        if not alike:  # every rank raises these by itself
            try:
                self.failure.end(exception)
            except (StageFailedError, SIGTERMException) as told:
                if not isinstance(exception, NonFiniteError):  # which every rank raises, with all there is
                    exception.add_note(str(told))
        self.world.close()
        self.replica.close()
        if self.groups.aborted:  # in hooks that come when the run has ended
            self._undo_last()
            self.groups.lookout.stop()
            return
        self.groups.abort()
        self.checkpoints.close(failed=True)

    def close(self) -> None:
        """End the run: the module becomes whole, on CPU, on the ranks that `gather_weights` names.

        On the others what they did not hold is on the meta device. After an exception the other stages'
        weights are not to be had; the module then keeps empty tensors for them, which fail loudly when used.
        """
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        if self._failed or self.ends_together:
            self._undo_last()
        if self.last_plan is not None and not self._failed and self._placement.num_ranks > 1:
            timeline = self.executor.timeline
            text = too_small(timeline.last) if timeline.tells_work else None
            if text is not None:
                rank_zero_info(text)
        if self._is_split:
            self._make_whole()
        if not self._failed:
            all_came = self.groups.close(goes_on=not self.ends_together)
            self.checkpoints.close(failed=False)
            if not all_came:
                self.failure.missed("the end of the run")

    def leave(self) -> None:
        """After `close` and the user's last hooks, which may fail on one rank: wait for the others."""
        if self._failed or self.ends_together:
            return
        all_came = self.groups.leave()
        self._undo_last()
        if not all_came:
            self.failure.missed("the end of the last hooks")

    def _undo_last(self) -> None:
        for undo in reversed(self._at_last):
            undo()
        self._at_last = []

    def _make_whole(self) -> None:
        if self._failed:
            self.split.restore()
            return
        self.split.mode.forget()
        how = self._settings.gather_weights
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        make_whole(self._module, callbacks, self.split, self.owns(), self.replica, how, staged=self._staged)
