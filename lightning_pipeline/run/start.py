"""How a run starts: others are told of failures, a job goes on where one was, and the module is split."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import newest_verified
from lightning_pipeline.data import EarlyLoaders
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.hooks import Beside, LogRecorder, own_logs_shown
from lightning_pipeline.model.construction import Construction
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.ranks import write_crash
from lightning_pipeline.run.batch import (
    Parts,
    Plans,
    samples_of,
    split_arguments,
    trains_batch_norm,
)
from lightning_pipeline.run.in_step import RanksInStep, is_refusal, quits, saver_of
from lightning_pipeline.run.run import Pipeline
from lightning_pipeline.run.setup import (
    Cut,
    Cutting,
    FirstCall,
    LoaderHook,
    around_forwards,
    batch_statistics,
    headline,
    hooks_undone,
    lazy_layers,
    loaders_undone,
    make_lazy_layers,
    materialize,
    runs_whole,
    seed_of_run,
    steered,
    stream_undone,
    summarize_before_split,
    told_of_no_group,
)
from lightning_pipeline.run.stages import Stages
from lightning_pipeline.settings import Settings


def save_before(refusal: BaseException, trainer: Trainer) -> None:
    """Save a run that a hook of all ranks ends by asking for what stages cannot do.

    Args:
        refusal: Gets a note of where.
        trainer: Of the run. One that saves nothing saves nothing here.
    """
    saver = saver_of(trainer)
    if saver is None or saver.save_on_exception or trainer.global_step == 0:
        return
    name = f"refused-epoch={trainer.current_epoch}-step={trainer.global_step}{saver.FILE_EXTENSION}"
    path = Path(saver.dirpath or "") / name
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:
        refusal.add_note(f"the run could not be saved before: {error}")
    else:
        refusal.add_note(f"the run was saved before, and goes on from there with ckpt_path={str(path)!r}")


def begin(pipeline: Pipeline, trainer: Trainer, settings: Settings) -> None:
    """Let the other ranks know of an exception before any callback does, which may upload for minutes.

    Args:
        pipeline: Of the run.
        trainer: Of the run.
        settings: Of the strategy.
    """
    groups = pipeline.groups

    def tell() -> None:
        raised = sys.exc_info()[1]
        assert raised is not None, "Lightning calls this hook while it handles an exception"
        first = not pipeline.ends_together  # it is called once more before each callback
        pipeline.fail(raised)
        if first and pipeline.ends_together and is_refusal(raised):
            save_before(raised, trainer)
        if quits(raised) and not pipeline.ends_together:
            raised.code = 1  # others fail, for this rank has left them

    if groups.numbering.world_size == 1:
        pipeline.at_last(told_of_no_group())
    pipeline.at_last(_lightning.before_hooks(trainer, {("Callback", "on_exception"): tell}))
    groups.lookout.doing = lambda: _lightning.current_hook(trainer) or "code outside of hooks"
    pipeline.failure.report = lambda cause: write_crash(
        Path(trainer.default_root_dir), groups.global_rank, cause, groups.lookout.recent(), settings
    )

    def newest() -> str | None:
        folders = [
            Path(callback.dirpath)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None
        ]
        share = pipeline.members.from_zero.share
        path: str | None = share(lambda: newest_verified(folders), "choosing a checkpoint")
        return path

    if settings.resume == "auto" and trainer.state.fn == TrainerFn.FITTING:
        pipeline.at_end(_lightning.resume_from(trainer, newest))


class Splitting:
    """Looks at a first batch, cuts the module, and keeps this rank's stages; all ranks do so together.

    Args:
        run: Its ranks and data; gets the stages.
        plugin: Whose context the forwards run in.
    """

    def __init__(self, run: Pipeline, plugin: Precision) -> None:
        self._run, self._settings, self._placement = run, run.settings, run.placement
        self._trainer, self._module, self._plugin = run.trainer, run.trainer.lightning_module, plugin
        self._device, self._here = run.device, run.placement.stages_of(run.groups.rank)
        over_batch = run.settings.loss_over_batch
        self._plans = Plans(run.settings.schedule, run.placement.num_ranks, over_batch=over_batch)
        self._forwards = around_forwards(plugin, run.groups.numbering.replicas)

    def split(self, built: Construction | None = None) -> None:
        """Do it. With no data the module stays whole, for nothing will run.

        Args:
            built: The weights that the module has not yet.
        """
        run, trainer = self._run, self._trainer
        run.seed = seed_of_run(run.members.from_zero)
        run.list_parameters()
        together = self._keep_together()
        early = EarlyLoaders(
            trainer, run.feed, together.equal_random_states, partial(hooks_undone, trainer), run.loops,
            partial(LoaderHook, trainer), loaders_undone, stream_undone,
        )  # fmt: skip
        run.at_end(early.restore)
        run.at_end(own_logs_shown(trainer))
        first = early.first_arguments()
        self._let_the_trainer_see(together)
        if first is not None:
            self._keep_stages(*first, built, early, together)

    def _let_the_trainer_see(self, together: RanksInStep) -> None:
        """From now on the Trainer counts, watches and writes for ranks that hold a part each."""
        run, trainer, num_ranks = self._run, self._trainer, self._placement.num_ranks
        _lightning.count_replicas_as_devices(trainer, num_ranks)
        run.at_end(_lightning.evaluate_with_versions(trainer))
        if trainer.training:
            run.at_end(run.position.install())
            run.at_end(summarize_before_split(trainer))
            run.at_end(_lightning.skip_without_loss(trainer))
            several = run.groups.numbering.replicas > 1
            run.at_end(_lightning.before_hooks(trainer, together.at_hooks(trainer, several=several)))
            clock = partial(run.members.from_zero.share, what="asking for the time to validate")
            run.at_end(_lightning.validate_by_the_clock_of(trainer, clock))
        if trainer.predicting and num_ranks > 1:
            has = self._placement.num_stages - 1 in self._here
            run.at_end(_lightning.write_predictions_once(trainer, has=has))

    def _keep_stages(
        self, step: str, args: tuple[Any, ...], built: Construction | None, early: EarlyLoaders,
        together: RanksInStep,
    ) -> None:  # fmt: skip
        run, trainer = self._run, self._trainer
        with early.shown():
            number, at_least = self._choose_number(step, args)
            parts = split_arguments(self._module, step, args, number, says=True)
        run.at_end(lambda: _lightning.claim_device(self._module, torch.device("cpu")))
        _lightning.claim_device(self._module, self._device)
        says = self._headline(parts, number)
        with parts.explained(args[0]):
            cut = self._cut(step, parts.args[0], number, built, early)
        line = cut.partition.trace.steered_at if trainer.training else ""  # others are run whole for it
        says += f"\n{steered(line, len(parts.args))}" if line and len(parts.args) > 1 else ""
        says += f"\n{cut.advice}" if cut.advice else ""
        run.built_in_parts = bool(built)
        materialize(self._module, cut, self._here, run.world, run.members.replica, built)
        recorder = LogRecorder(self._module)
        split = run.members.agreed(
            lambda: SplitModel(
                self._module, cut.partition, list(self._here), seed=run.seed, device=self._device,
                sinks=recorder.sinks, later=cut.later,
                forward_context=self._forwards, others=Beside(trainer).owners,
                loss_over_batch=self._settings.loss_over_batch,
            )
        )  # fmt: skip
        run.stages = stages = Stages(
            run.members, self._settings, self._placement, trainer, cut, split, says
        )  # fmt: skip
        end_batch = partial(together.end_batch, trainer)
        stages.connect(recorder, self._plans, self._plugin, end_batch, number, at_least)

    def _keep_together(self) -> RanksInStep:
        run, trainer = self._run, self._trainer
        together = RanksInStep(run.members, run.position.epoch_starts, run.checkpoints)
        together.equal_random_states()
        run.at_end(together.watch_signals(trainer))
        run.together = together
        return together

    def _headline(self, parts: Parts, number: int) -> str:
        settings, trains = self._settings, self._trainer.training
        if trains and settings.trains_whole(automatic=self._module.automatic_optimization):
            return runs_whole("whole_steps=True" if settings.whole_steps else "Manual optimization")
        plan = self._plans.plan(len(parts.args), forward_only=not trains)
        replicas = self._run.groups.numbering.replicas
        text = headline(
            plan, settings.schedule, batch_size=parts.batch_size, replicas=replicas,
            asked=None if settings.num_microbatches == "auto" else number, trains=trains,
        )  # fmt: skip
        if trains and plan.num_microbatches > 1 and trains_batch_norm(self._module):
            text += f"\n{batch_statistics(plan, parts.batch_size)}"
        return text

    def _cut(
        self, step: str, args: tuple[Any, ...], number: int, built: Construction | None,
        early: EarlyLoaders,
    ) -> Cut:  # fmt: skip
        members = self._run.members
        cutting = Cutting(
            self._trainer, self._settings, self._forwards, self._device, members.from_zero,
            members.agreed,
        )  # fmt: skip
        with early.shown():
            if lazy_layers(self._module):
                self._make_lazy_layers(FirstCall(step, args, early.states[step]), number, early)
            cut = cutting.choose(step, args, self._placement.num_stages, built)
            later = early.later_arguments(step)
            if later is None:
                return cut
            return cutting.look_at(cut, later[0], split_arguments(self._module, *later, number).args[0])

    def _make_lazy_layers(self, call: FirstCall, number: int, early: EarlyLoaders) -> None:
        checked, calls = early.later_arguments(call.step), [call]
        if checked is not None:  # the sanity check comes first
            args = split_arguments(self._module, *checked, number).args[0]
            calls.insert(0, FirstCall(checked[0], args, early.states[checked[0]]))
        states = self._run.members.from_zero.share(lambda: [one.states for one in calls])
        calls = [one._replace(states=equal) for one, equal in zip(calls, states, strict=True)]
        self._run.members.agreed(lambda: make_lazy_layers(self._trainer, calls, self._forwards))

    def _choose_number(self, step: str, args: Sequence[Any]) -> tuple[int, int]:
        """Micro-batches of a batch, and samples that each should have."""
        if self._settings.num_microbatches != "auto":
            return self._settings.num_microbatches, 1
        at_least = 1 + trains_batch_norm(self._module)

        def choose() -> int:
            return self._plans.choose_number(samples_of(self._module, step, args), at_least=at_least)

        return int(self._run.members.from_zero.share(choose)), at_least
