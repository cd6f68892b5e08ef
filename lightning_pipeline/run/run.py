"""What exists between the start and the end of one run of a Trainer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import Checkpoints, checkpoint_options
from lightning_pipeline.data import Feed, Position
from lightning_pipeline.errors import ConfigurationError, NonFiniteError, SplitError, StageFailedError
from lightning_pipeline.hooks import UncutBatch
from lightning_pipeline.patching import all_undone
from lightning_pipeline.ranks import Within, gather_rows
from lightning_pipeline.registry import named_parameters_of
from lightning_pipeline.run.batch import Batch
from lightning_pipeline.run.held import Whole
from lightning_pipeline.run.in_step import RanksInStep
from lightning_pipeline.run.members import Members
from lightning_pipeline.run.one_device import OneDevice
from lightning_pipeline.run.setup import too_small
from lightning_pipeline.run.stages import Stages
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
        built_in_parts: Whether ranks have built their own stages only.
        loops: Where those of a checkpoint stand that the run goes on from, as far as loaders are made by it.
        together: Keeps the ranks in step, once they are to be split; see `start.Splitting`.
    """

    seed: int
    order: list[str]

    def __init__(
        self, settings: Settings, placement: Plan, backend: str, device: torch.device, trainer: Trainer,
        within: Within,
    ) -> None:  # fmt: skip
        self.settings, self.placement, self.device = settings, placement, device
        self.trainer, self._module = trainer, trainer.lightning_module
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
        self._undo: list[Callable[[], Any]] = []
        self._at_last: list[Callable[[], Any]] = []
        self._failed = self.built_in_parts = False
        self.together: RanksInStep | None = None
        self.loops: Mapping[str, Any] = {}

    # Setting up

    def at_end(self, undo: Callable[[], Any]) -> None:
        """Call something when the run ends, before what was added earlier."""
        self._undo.append(undo)

    def at_last(self, undo: Callable[[], Any]) -> None:
        """Call something after the user's last hooks, which come when the run has ended."""
        self._at_last.append(undo)

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

    def list_parameters(self) -> None:
        """Note the order that the module's parameters stand in now."""
        self.order = [name for name, _ in named_parameters_of(self._module)]

    def resume(self, stood: Mapping[str, Any] | None) -> None:
        """Go on where the saved run stood in its data and random numbers; `None`: that is not known."""
        self.position.resume(stood)
        if stood is not None:
            self.seed = stood["seed"]
            self.stages.reseed(self.seed)

    # Steps

    def training_batch(self, args: Sequence[Any], *, stepping: bool) -> Batch | UncutBatch:
        """A batch to be trained on; its gradients are set aside.

        Args:
            args: Of `training_step`.
            stepping: Whether the optimizer steps on this batch.
        """
        self.checkpoints.check()
        self.feed.check(args[0], self.trainer.fit_loop.batch_idx, "training_step")
        return self.split.training_batch(args, stepping=stepping)

    def evaluated_batch(self, step: str, args: Sequence[Any]) -> Batch | UncutBatch:
        """A batch of validation, test or predict."""
        batch_idx = _lightning.evaluation_loop(self.trainer).batch_progress.current.ready - 1
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
        return gather_rows(tensor, group) if sync_grads else _lightning.gather_over(tensor, group)

    # The end

    @property
    def ends_together(self) -> bool:
        """Whether all ranks end at this point, by a SIGTERM or an exception of all: they still answer."""
        return self.together is not None and self.together.ending

    def fail(self, exception: BaseException) -> None:
        """The run ends with an exception: tell the other ranks, so that none waits for this one.

        Args:
            exception: Gets a note when another rank failed first.
        """
        is_whole = isinstance(self.stages, Whole)
        together = None if is_whole else self.together
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
            if stages.last_plan is not None and not self._failed and self.placement.num_ranks > 1:
                text = too_small(stages.executor.timeline.work)
                if text is not None:
                    rank_zero_info(text)
            stages.join(failed=self._failed, staged=self.built_in_parts)
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

    _settings: Settings
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
        is_there = self._pipeline is not None or dist.is_initialized()  # code of one process is told of none
        return not is_there or _lightning.is_interrupted(trainer)

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
