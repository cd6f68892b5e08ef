"""Where a module is cut, and this rank's stages of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_pipeline import _lightning
from lightning_pipeline.errors import PartitionError, SplitError, StageFailedError
from lightning_pipeline.hooks import Beside
from lightning_pipeline.model.construction import Construction, is_whole, sizes_of
from lightning_pipeline.model.cut import (
    Partition,
    StageTable,
    Trials,
    opened,
    partition,
    stages_of_states,
    too_large,
)
from lightning_pipeline.model.trace import Trace, Unit, find_units, trace_step, untraced
from lightning_pipeline.ranks import Company, Outlet
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.run.setup.trainer import as_the_loop_will
from lightning_pipeline.settings import Settings
from lightning_pipeline.weights import fetch_absent

_BEFORE_STEPS = (
    "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
)  # fmt: skip
"""Hooks that may set what the first training step reads."""


@dataclass(frozen=True)
class Cut:
    """Where the module is cut, the same on every rank.

    Attributes:
        partition: What the split is made from.
        table: The stages, as rank 0 sees them.
        later: Traces of other steps that the run will call, made while the module was whole.
        advice: What is too large for stages to be of use, in a sentence; empty where nothing is.
    """

    partition: Partition
    table: StageTable
    later: tuple[Trace, ...] = ()
    advice: str = ""


class Cutting:
    """Traces steps of a whole module and chooses where it is cut; all ranks do it together.

    Args:
        trainer: In its setup; what a step may change of its data module, callbacks and so on is put back.
        settings: For `partition` and `units`.
        forward_context: The precision plugin's.
        device: Of this rank, where its batch is.
        from_zero: To all ranks.
        agreed: Does local work on all ranks or raises on all of them.
    """

    def __init__(
        self, trainer: Trainer, settings: Settings,
        forward_context: Callable[[], AbstractContextManager[Any]], device: torch.device,
        from_zero: Outlet, agreed: Callable[[Callable[[], Any]], Any],
    ) -> None:  # fmt: skip
        self._trainer, self._module, self._settings = trainer, trainer.lightning_module, settings
        self._context, self._device = forward_context, device
        self._from_zero, self._agreed = from_zero, agreed

    def choose(
        self, step: str, args: tuple[Any, ...], num_stages: int, built: Construction | None = None
    ) -> Cut:
        """Trace a step and choose the stages. Rank 0 chooses: its batch may have other sizes than others'.

        With manual optimization, and where a step of evaluation cannot be cut, nothing is traced: every rank
        runs the step. Nor is a training step that stumbles over what hooks before it are to set: that one is
        traced when it comes.

        Args:
            step: Name of the step to trace.
            args: Its arguments, of one micro-batch.
            num_stages: Stages of all ranks.
            built: The weights that the module has not yet. Where the step cannot be traced without, all are
                made.

        Raises:
            MisconfigurationException: The training step returns no loss, in Lightning's own words.
            SplitError: The training step cannot be cut.
            PartitionError: The asked-for stages are not possible.
        """
        how, trains = self._settings.partition, step == "training_step"

        def choose(whole: bool) -> Partition:
            units = find_units(self._module, at_least=num_stages, keep_whole=self._settings.units)
            if whole:
                return partition(untraced(self._module, step, units), num_stages, how=how)

            def traced(found: list[Unit]) -> Trace:
                return self._trace(step, args, units=found)

            trials = Trials(self._module, num_stages, self._settings.units, traced)
            try:
                trace = opened(units, num_stages, traced)
            except SplitError as error:
                if built or not trains or self._may_come(error, built):
                    raise  # more is tried than other units
                raise trials.explained(error, units) from error.__cause__
            if trains and trace.divided_at:
                trace.way_out = trials.whole(units)
            return partition(trace, num_stages, how=how, tried=trials.finer)

        whole = trains and self._settings.trains_whole(automatic=self._module.automatic_optimization)
        with as_the_loop_will(self._trainer, step):
            chosen = self._chosen(choose, step, built, whole=whole)
            if trains and not chosen.trace.is_made_up:
                _lightning.explain_output(chosen.trace.returns, chosen.trace.returned)
            table: StageTable = self._from_zero.share(chosen.table)
            names = [row.units[0] for row in table.rows[1:]]
            if names != [row.units[0] for row in chosen.table().rows[1:]]:
                chosen = self._agreed(lambda: partition(chosen.trace, num_stages, how=names))
        return Cut(chosen, table, advice=too_large(chosen) or "")

    def _chosen(
        self, choose: Callable[[bool], Partition], step: str, built: Construction | None, *, whole: bool
    ) -> Partition:
        """The stages, chosen without a trace where there can be none yet."""
        while True:
            try:
                found: Partition = self._agreed(partial(choose, whole))
            except PartitionError:
                if whole or step == "training_step":
                    raise
                whole = True  # such as a loop over tokens, whose values flow in a circle: every rank runs it
            except (SplitError, StageFailedError) as error:
                if whole:
                    raise
                whole = self._resort(error, step, built)
            else:
                return found

    def _resort(self, error: Exception, step: str, built: Construction | None) -> bool:
        """Say what is done about a step that cannot be traced yet, or raise.

        Args:
            error: Why.
            step: Its name.
            built: The weights that the module has not yet; they are made where no hook is known to help.

        Returns:
            Whether the stages are to be chosen without a trace.
        """
        trains = step == "training_step"
        whole: bool = not trains or self._from_zero.share(partial(self._may_come, error, built))
        if built and not (trains and whole):
            built.make()
            rank_zero_warn(
                f"the step cannot be traced without weights, so every process built the whole "
                f"module, {sizes_of(parameters_of(self._module)) / 2**20:,.1f} MiB: {error}"
            )
            return False
        if not whole:
            raise error
        if trains:
            rank_zero_info(
                f"{step} needs what hooks before it set, so it is traced when it comes, and the stages are "
                f"chosen by the number of parameters, in the order of the module: {error}"
            )
        return whole

    def _may_come(self, error: Exception, built: Construction | None) -> bool:
        """Whether hooks between the setup and the first step may bring what a step has stumbled over.

        Where weights are not made yet it may be these that it lacks, unless it names an attribute.
        """
        cause = error.__cause__
        if isinstance(cause, AttributeError) and isinstance(cause.obj, nn.Module):
            return True
        return not built and cause is not None and _lightning.has_own_hooks(self._trainer, _BEFORE_STEPS)

    def look_at(self, cut: Cut, step: str, args: tuple[Any, ...]) -> Cut:
        """The cut with the trace of another step, made while the module is whole.

        A step that stumbles over what hooks before it are to set is left to be traced when it comes, and one
        that cannot be cut is run by every rank.

        Args:
            cut: Of its first step.
            step: Name of the other one.
            args: Its arguments, of one micro-batch.
        """

        def look() -> Cut:
            first = cut.partition.trace
            try:
                with torch.no_grad():
                    trace = self._trace(step, args, units=first.units, seen=first.calls)
            except SplitError:
                return cut
            return replace(cut, later=(*cut.later, trace))

        with as_the_loop_will(self._trainer, step):
            found: Cut = self._agreed(look)
        return found

    def _trace(self, step: str, args: tuple[Any, ...], **options: Any) -> Trace:
        return trace_step(
            self._module, step, args, forward_context=self._context, device=self._device,
            others=Beside(self._trainer).owners(), ahead=step == "training_step", **options,
        )  # fmt: skip


def materialize(
    module: LightningModule, cut: Cut, stages: tuple[int, ...], world: Company, replica: Company,
    built: Construction | None,
) -> None:  # fmt: skip
    """Give what this rank is to hold its values, where the module has none; all ranks call.

    Args:
        module: Not split.
        cut: The same on every rank.
        stages: Of this rank.
        world: All ranks.
        replica: Those that hold the module together.
        built: The weights that can be made.
    """
    if world.any_of("looking for weights", not is_whole(module))[0]:
        chosen = cut.partition
        needed = stages_of_states(module, chosen.trace, chosen.stage_of, chosen.num_stages)
        own = {name for name, users in needed.items() if set(users) & set(stages)}
        if built is not None:
            built.make(own)
        fetch_absent(module, own, replica)
