"""What exists between the start and the end of one run of a Trainer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import Checkpoints, checkpoint_options
from lightning_pipeline.data import EarlyLoaders, Feed, Position
from lightning_pipeline.errors import ConfigurationError, NonFiniteError, SplitError, StageFailedError
from lightning_pipeline.hooks import LogRecorder, UncutBatch
from lightning_pipeline.model.construction import Construction
from lightning_pipeline.patching import all_undone
from lightning_pipeline.ranks import Within
from lightning_pipeline.run.batch import (
    Batch,
    Parts,
    Plans,
    samples_of,
    split_arguments,
    trains_batch_norm,
)
from lightning_pipeline.run.in_step import RanksInStep
from lightning_pipeline.run.members import Members
from lightning_pipeline.run.one_device import OneDevice
from lightning_pipeline.run.setup import (
    BY_HAND,
    Cut,
    Cutting,
    FirstCall,
    around_forwards,
    batch_statistics,
    headline,
    hooks_undone,
    lazy_layers,
    make_lazy_layers,
    materialize,
    seed_of_run,
    steered,
    summarize_before_split,
    too_small,
)
from lightning_pipeline.run.stages import Stages, split_module
from lightning_pipeline.run.whole import Whole
from lightning_pipeline.schedules import Plan
from lightning_pipeline.settings import Settings


class Pipeline:
    """One run: its ranks, data, stages and checkpoints. All ranks make and use one together.

    Args:
        settings: Of the strategy.
        placement: Which pipeline rank holds which stage.
        backend: Of the collectives.
        device: Of this rank.
        trainer: Of the run.
        within: Does what all ranks do together before somebody watches over waits.

    Attributes:
        members: The ranks.
        feed: What a replica is fed with.
        checkpoints: Saves and loads.
        stages: Those of this rank; the whole module before it is split, and where there is no data.
        position: Where the run stands in its data.
        seed: Of the random numbers in steps; the same on every rank.
        order: The parameters' names in the whole module.
    """

    def __init__(
        self, settings: Settings, placement: Plan, backend: str, device: torch.device, trainer: Trainer,
        within: Within,
    ) -> None:  # fmt: skip
        self._settings, self._placement, self._device = settings, placement, device
        self._trainer, self._module = trainer, trainer.lightning_module
        self.members = members = Members(settings, placement, backend, device, within)
        self.groups, self.failure, self.world = members.groups, members.failure, members.world
        groups = members.groups
        self.feed = Feed(
            groups.replica, members.ranks, members.gather_for("comparing batches"), members.from_last,
            settings.data,
        )  # fmt: skip
        options = checkpoint_options(settings, placement.num_stages)
        checkpoints = partial(Checkpoints, options, groups.numbering, groups.store, groups.lookout)
        self.checkpoints: Checkpoints = within("making groups", checkpoints)
        self.position = Position(trainer, counts=True)  # `setup` may ask for the number of steps
        self.stages: Stages | Whole = Whole(self._module)
        self._plans = Plans(settings.schedule, placement.num_ranks, over_batch=settings.loss_over_batch)
        self._undo: list[Callable[[], Any]] = []
        self._at_last: list[Callable[[], Any]] = []
        self._failed = self._built_in_parts = False
        self._together: RanksInStep | None = None

    # Setting up

    def at_end(self, undo: Callable[[], Any]) -> None:
        """Call something when the run ends, before what was added earlier."""
        self._undo.append(undo)

    def at_last(self, undo: Callable[[], Any]) -> None:
        """Call something after the user's last hooks, which come when the run has ended."""
        self._at_last.append(undo)

    def split_module(self, plugin: Precision, built: Construction | None = None) -> None:
        """Look at a first batch, cut the module, and keep this rank's stages.

        With no data the module stays whole, for nothing will run.

        Args:
            plugin: Whose context the forwards run in.
            built: The weights that the module has not yet.
        """
        trainer, members = self._trainer, self.members
        self.seed = self.feed.seed = seed_of_run(members.from_zero)
        self.order = [name for name, _ in self._module.named_parameters()]
        together = self._keep_together()
        early = EarlyLoaders(trainer, self.feed, together.equal_random_states, partial(hooks_undone, trainer))
        self._undo.append(early.restore)
        first = early.first_arguments()
        _lightning.count_replicas_as_devices(trainer, self._placement.num_ranks)
        if trainer.training:
            self._undo += [self.position.install(), summarize_before_split(trainer)]
            self._undo.append(_lightning.skip_without_loss(trainer))
            several = self.groups.numbering.replicas > 1
            self._undo.append(_lightning.before_hooks(trainer, together.at_hooks(trainer, several=several)))
            clock = partial(members.from_zero.share, what="asking for the time to validate")
            self._undo.append(_lightning.validate_by_the_clock_of(trainer, clock))
        last, here = self._placement.num_stages - 1, self._placement.stages_of(self.groups.rank)
        if trainer.predicting and self._placement.num_ranks > 1:
            self._undo.append(_lightning.write_predictions_once(trainer, has=last in here))
        if first is None:
            return
        step, args = first
        number, at_least = self._choose_number(args)
        self._undo.append(lambda: _lightning.claim_device(self._module, torch.device("cpu")))
        _lightning.claim_device(self._module, self._device)
        parts = split_arguments(self._module, args, number, says=True)
        says = self._headline(parts, number)
        with parts.explained(args[0]):
            cut = self._cut(plugin, step, parts.args[0], number, built, early)
        line = cut.partition.trace.steered_at if trainer.training else ""  # others are run whole for it
        says += f"\n{steered(line, len(parts.args))}" if line and len(parts.args) > 1 else ""
        says += f"\n{cut.advice}" if cut.advice else ""
        self._built_in_parts = bool(built)
        materialize(self._module, cut, here, self.world, self.members.replica, built)
        recorder = LogRecorder(self._module)
        split = self.members.agreed(
            lambda: split_module(
                self._module, cut, here, recorder, self._forwards(plugin), self._device, self.seed, trainer,
                loss_over_batch=self._settings.loss_over_batch,
            )
        )  # fmt: skip
        stages = Stages(self.members, self._settings, self._placement, trainer, cut, split, says)
        self.stages = stages
        stages.connect(recorder, self._plans, plugin, partial(together.end_batch, trainer), number, at_least)

    def _keep_together(self) -> RanksInStep:
        members, trainer = self.members, self._trainer
        together = RanksInStep(members, self.position.epoch_starts, self.checkpoints)
        together.equal_random_states()
        self._undo.append(together.watch_signals(trainer))
        self._together = together
        return together

    def _headline(self, parts: Parts, number: int) -> str:
        settings, trains = self._settings, self._trainer.training
        if trains and not self._module.automatic_optimization:
            return BY_HAND
        plan = self._plans.plan(len(parts.args), forward_only=not trains)
        text = headline(
            plan, settings.schedule, batch_size=parts.batch_size, replicas=self.groups.numbering.replicas,
            asked=None if settings.num_microbatches == "auto" else number, trains=trains,
        )  # fmt: skip
        if trains and plan.num_microbatches > 1 and trains_batch_norm(self._module):
            text += f"\n{batch_statistics(plan, parts.batch_size)}"
        return text

    def _cut(
        self, plugin: Precision, step: str, args: tuple[Any, ...], number: int, built: Construction | None,
        early: EarlyLoaders,
    ) -> Cut:  # fmt: skip
        members = self.members
        cutting = Cutting(
            self._trainer, self._settings, self._forwards(plugin), self._device, members.from_zero,
            members.agreed,
        )  # fmt: skip
        with early.shown():
            if lazy_layers(self._module):
                self._make_lazy_layers(plugin, FirstCall(step, args, early.states[step]), number, early)
            cut = cutting.choose(step, args, self._placement.num_stages, built)
            later = early.later_arguments(step)
            if later is None:
                return cut
            return cutting.look_at(cut, later[0], split_arguments(self._module, later[1], number).args[0])

    def _make_lazy_layers(self, plugin: Precision, call: FirstCall, number: int, early: EarlyLoaders) -> None:
        checked, calls = early.later_arguments(call.step), [call]
        if checked is not None:  # the sanity check comes first
            args = split_arguments(self._module, checked[1], number).args[0]
            calls.insert(0, FirstCall(checked[0], args, early.states[checked[0]]))
        states = self.members.from_zero.share(lambda: [one.states for one in calls])
        calls = [one._replace(states=equal) for one, equal in zip(calls, states, strict=True)]
        self.members.agreed(lambda: make_lazy_layers(self._trainer, calls, self._forwards(plugin)))

    def _forwards(self, plugin: Precision) -> Callable[[], AbstractContextManager[Any]]:
        return around_forwards(plugin, self.groups.numbering.replicas)

    def _choose_number(self, args: Sequence[Any]) -> tuple[int, int]:
        """Micro-batches of a batch, and samples that each should have."""
        if self._settings.num_microbatches != "auto":
            return self._settings.num_microbatches, 1
        at_least = 1 + trains_batch_norm(self._module)

        def choose() -> int:
            return self._plans.choose_number(samples_of(self._module, args), at_least=at_least)

        return int(self.members.from_zero.share(choose)), at_least

    @property
    def split(self) -> Stages:
        """The stages, where steps run.

        Raises:
            ConfigurationError: There are none yet, or no data.
        """
        if isinstance(self.stages, Whole):
            raise ConfigurationError(
                "the stages are known once the module is split: after the `setup` hooks (ask from "
                "`configure_optimizers` on), and only in a run that has data"
            )
        return self.stages

    def resume(self, stood: Mapping[str, Any] | None) -> None:
        """Go on where the saved run stood in its data and random numbers; `None`: that is not known."""
        self.position.resume(stood)
        if stood is not None:
            self.seed = self.feed.seed = stood["seed"]
            self.stages.reseed(self.seed)
            self.feed.moved = stood["moved"]

    # Steps

    def training_batch(self, args: Sequence[Any], *, stepping: bool) -> Batch | UncutBatch:
        """A batch to be trained on; its gradients are set aside.

        Args:
            args: Of `training_step`.
            stepping: Whether the optimizer steps on this batch.
        """
        self.checkpoints.check()
        self.feed.check(args[0], self._trainer.fit_loop.batch_idx, "training_step")
        return self.split.training_batch(args, stepping=stepping)

    def evaluated_batch(self, step: str, args: Sequence[Any]) -> Batch | UncutBatch:
        """A batch of validation, test or predict."""
        batch_idx = _lightning.evaluation_loop(self._trainer).batch_progress.current.ready - 1
        self.feed.check(args[0], batch_idx, step)
        return self.split.evaluated_batch(step, args, batch_idx)

    # Collectives of Lightning's

    def reduce(self, value: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor over the replicas, or the group that was asked for."""
        group = self.groups.data_parallel if group is None else group
        value = self.stages.complete(value)
        if not isinstance(value, Tensor) or group is None:
            return value
        return _lightning.reduce_over(value, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        """Gather over the replicas; with one replica the tensor as it is, as on one device."""
        if group is None or group is dist.group.WORLD:
            group = self.groups.data_parallel
        tensor = self.stages.complete(tensor)
        if group is None or group.size() == 1:
            return tensor
        return _lightning.gather_over(tensor, group, sync_grads)

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
        is_whole = isinstance(self.stages, Whole)
        together = None if is_whole else self._together
        if self.ends_together or self._failed or (together is not None and together.all_raise(exception)):
            return
        self._failed = True
        alike = isinstance(exception, ConfigurationError | SplitError) and is_whole
        if not alike:  # every rank raises these by itself
            try:
                self.failure.end(exception)
            except (StageFailedError, SIGTERMException) as told:
                if not isinstance(exception, NonFiniteError):  # which every rank raises, with all there is
                    exception.add_note(str(told))
        self.members.close()
        if self.groups.aborted:  # in hooks that come when the run has ended
            self._undo_last()
            self.groups.lookout.stop()
            return
        self.groups.abort()
        self.checkpoints.close(failed=True)

    def close(self) -> None:
        """End the run: the module becomes whole. See `Stages.join`."""
        stages = self.stages
        if isinstance(stages, Stages):
            stages.disconnect()
        undo, self._undo = self._undo, []
        all_undone(undo)()
        if self._failed or self.ends_together:
            self._undo_last()
        if isinstance(stages, Stages):
            if stages.last_plan is not None and not self._failed and self._placement.num_ranks > 1:
                text = too_small(stages.executor.timeline.work)
                if text is not None:
                    rank_zero_info(text)
            stages.join(failed=self._failed, staged=self._built_in_parts)
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
        undo, self._at_last = self._at_last, []
        all_undone(undo)()


class Running:
    """The run of a strategy, while there is one: a pipeline, or that of one device."""

    lightning_module: LightningModule | None
    _pipeline: Pipeline | None = None
    _one_device: OneDevice | None = None

    @property
    def _alone(self) -> bool:
        """Whether nobody would answer: before the group exists, and once this rank's run was interrupted.

        Callbacks that save on an exception run before the other ranks are told; they must not wait for them.
        """
        if self._pipeline is not None and self._pipeline.groups.aborted:
            return True
        if self._pipeline is not None and self._pipeline.ends_together:
            return False
        trainer = getattr(self.lightning_module, "_trainer", None)
        return not dist.is_initialized() or _lightning.is_interrupted(trainer)

    @property
    def _has_ended(self) -> bool:
        return self._one_device is None and self._pipeline is None

    @property
    def _run(self) -> Pipeline | OneDevice:
        run = self._one_device or self._pipeline
        if run is None:
            raise ConfigurationError(
                "no run is under way, or its module is not split yet: it is from `configure_optimizers` on"
            )
        return run

    @property
    def _stages(self) -> Stages | Whole | OneDevice:
        run = self._run
        return run if isinstance(run, OneDevice) else run.stages

    @property
    def _split(self) -> Stages | OneDevice:
        run = self._run
        return run if isinstance(run, OneDevice) else run.split

    @property
    def _running(self) -> Pipeline:
        run = self._run
        assert isinstance(run, Pipeline), "hooks of one device are those of the base class"
        return run
