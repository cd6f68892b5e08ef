"""One step of the user's module, run as a schedule: split the batch, run the plan, merge the results."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeline.data import batch_size_of, has_samples, merge_outputs, split_batch
from lightning_pipeline.errors import ConfigurationError, ScheduleError
from lightning_pipeline.executor import Executor
from lightning_pipeline.hooks import (
    LogRecorder,
    Report,
    ReportChannel,
    SharedMetrics,
    loss_of,
    replay,
)
from lightning_pipeline.model.loss import Weights, loss_of_batch, weights_of
from lightning_pipeline.model.replay import SplitModel, StepResult, WholeBatch
from lightning_pipeline.model.state import late_values, put_late_values
from lightning_pipeline.ranks import Outlet
from lightning_pipeline.run.replan import Reordering
from lightning_pipeline.schedules import ForwardOnly, Plan, Schedule
from lightning_pipeline.schedules.plans import training_plan

_MICROBATCHES_PER_RANK = 4  # with equal stages the bubble is then at most a fifth


class Plans:
    """The plans of a run, one per number of micro-batches, worked out when first needed.

    Args:
        schedule: The rule for training.
        num_ranks: Ranks of the pipeline.
    """

    def __init__(self, schedule: Schedule, num_ranks: int) -> None:
        self.schedule, self.num_ranks = schedule, num_ranks
        self._forward = ForwardOnly(like=schedule)
        self._made: dict[tuple[bool, int], Plan] = {}

    def plan(self, num_microbatches: int, *, forward_only: bool) -> Plan:
        """The plan for a batch.

        Args:
            num_microbatches: Of this batch.
            forward_only: Forwards alone, for evaluation.

        Raises:
            ScheduleError: The schedule does not serve this number, or trains nothing.
        """
        key = (forward_only, num_microbatches)
        if key not in self._made:
            self._made[key] = (
                self._forward.plan(self.num_ranks, num_microbatches)
                if forward_only
                else training_plan(self.schedule, self.num_ranks, num_microbatches)
            )
        return self._made[key]

    def use(self, plan: Plan) -> None:
        """Run this one from now on for training batches of as many micro-batches."""
        self._made[False, plan.num_microbatches] = plan

    def choose_number(self, batch_size: int | None, *, at_least: int = 1) -> int:
        """A number of micro-batches for batches of a size: a divisor where there is a good one.

        Args:
            batch_size: Samples, `None` where the batch cannot be split.
            at_least: Samples that each micro-batch should have. `BatchNorm` needs 2 to train.
        """
        if batch_size is None or self.num_ranks == 1:
            return 1
        most: int = max(1, min(batch_size // at_least, _MICROBATCHES_PER_RANK * self.num_ranks))
        divisors: list[int] = [
            m for m in range(most, 0, -1) if batch_size % m == 0 and m >= min(most, self.num_ranks)
        ]
        candidates: list[int] = [*divisors, *range(most, 0, -1)]
        for number in candidates:
            if self._serves(number):
                return number
        return most

    def _serves(self, number: int) -> bool:
        try:
            self.plan(number, forward_only=False)
        except ScheduleError:
            return False
        return True


@dataclass
class Parts:
    """A batch, split.

    Attributes:
        args: The arguments of the step for each micro-batch.
        sizes: Samples of each micro-batch; 1 each where the batch does not tell.
        batch_size: Samples of all; `None` where the batch does not tell.
    """

    args: list[tuple[Any, ...]]
    sizes: list[int]
    batch_size: int | None


def split_arguments(
    module: LightningModule, args: Sequence[Any], num_microbatches: int, *, at_least: int = 1
) -> Parts:
    """Split the batch, the first argument of every step; the others go to each micro-batch.

    Args:
        module: May override with `split_batch(batch, num_microbatches)`, which returns a list of parts.
        args: Of the step.
        num_microbatches: At most so many parts.
        at_least: Samples that each part should have, where we split.
    """
    batch, rest = args[0], tuple(args[1:])
    own: Callable[[Any, int], Sequence[Any]] | None = getattr(module, "split_batch", None)
    if own is None:
        pairs = split_batch(batch, num_microbatches, at_least=at_least)
        sizes = [size for _, size in pairs]
        total = sum(sizes) if has_samples(batch) else None
        return Parts([(part, *rest) for part, _ in pairs], sizes, total)
    parts = list(own(batch, num_microbatches))
    if not parts:
        raise ConfigurationError(f"{type(module).__name__}.split_batch returned no parts")
    return _sized([(part, *rest) for part in parts])


def samples_of(module: LightningModule, args: Sequence[Any]) -> int | None:
    """Samples of a batch that is to be split; `None` where there is nothing to split.

    Raises:
        ConfigurationError: Nothing tells how many there are.
    """
    if getattr(module, "split_batch", None) is not None:
        return split_arguments(module, args, 1).batch_size
    return batch_size_of(args[0]) if has_samples(args[0]) else None


def trains_batch_norm(module: LightningModule) -> bool:
    """Whether a part of the module needs two samples to train: with one there is no variance."""
    kinds = torch.nn.modules.batchnorm._BatchNorm
    return any(isinstance(part, kinds) and part.training for part in module.modules())


def _sized(args: list[tuple[Any, ...]]) -> Parts:
    try:
        sizes = [batch_size_of(part) for part, *_ in args]
    except ConfigurationError:  # only the user's split_batch knows what a sample is: parts count alike
        return Parts(args, [1] * len(args), None)
    return Parts(args, sizes, sum(sizes))


class StepRunner:
    """Runs steps of a split module and gives every rank what Lightning expects of one.

    Args:
        module: The LightningModule.
        split: Its stages on this rank.
        executor: Runs plans on them.
        plans: For any number of micro-batches.
        reports: From the last stage to the others.
        recorder: Where the last stage's `self.log` goes.
        metrics: Those of the module.
        replica: Of this rank.
        from_last: From the last stage's rank to the others.
        loss_weighting: Of the strategy.
    """

    def __init__(
        self,
        module: LightningModule,
        split: SplitModel,
        executor: Executor,
        plans: Plans,
        reports: ReportChannel,
        recorder: LogRecorder,
        metrics: SharedMetrics,
        replica: int,
        from_last: Outlet,
        loss_weighting: str = "auto",
    ) -> None:
        self._loss_weighting = loss_weighting
        self._module, self._split, self._executor, self._plans = module, split, executor, plans
        self._reports, self._recorder, self._metrics = reports, recorder, metrics
        self._replica, self._from_last = replica, from_last
        self._warned: set[Hashable] = set()
        self.num_microbatches = 1
        self.at_least = 1
        self.last_plan: Plan | None = None
        self.batch_size: int | None = None
        self.reordering: Reordering | None = None
        self.around_backwards: Callable[[], AbstractContextManager[None]] = nullcontext

    def train(self, args: Sequence[Any], key: tuple[int, ...], accumulate: int) -> dict[str, Any] | None:
        """Run a training step, backward included.

        Args:
            args: Of `training_step`.
            key: Of the random numbers: which batch of the run it is.
            accumulate: Batches that one optimizer step adds up; the gradients are divided by it.

        Returns:
            `loss`, that of the whole batch, detached, on every rank; on the last stage also what else the
            step returned, and elsewhere in its place what raises when it is used. `None` where no
            micro-batch has a loss.
        """
        parts = split_arguments(self._module, args, self.num_microbatches, at_least=self.at_least)
        self._warn_unsplit(args[0], parts)
        report, output = self._run("training_step", parts, args, key, accumulate)
        loss = loss_of(report)
        if loss is None:
            return None
        extras = _extras(output) or self._split.extras_elsewhere("training_step")
        return {"loss": loss, **extras}

    def evaluate(self, step: str, args: Sequence[Any], key: tuple[int, ...]) -> Any:
        """Run a step of validation, test or predict.

        Args:
            step: Its name.
            args: Its arguments.
            key: Of the random numbers.

        Returns:
            On the last stage what the step returned, merged; elsewhere `None`.
        """
        parts = split_arguments(self._module, args, self.num_microbatches)
        return self._run(step, parts, args, key)[1]

    def _run(
        self,
        step: str,
        parts: Parts,
        args: Sequence[Any],
        key: tuple[int, ...],
        accumulate: int | None = None,
    ) -> tuple[Report, Any]:
        weights = weights_of(
            self._module,
            self._loss_weighting,
            [batch for batch, *_ in parts.args],
            parts.sizes,
            accumulate or 1,
        )
        training = accumulate is not None
        with self.around_backwards() if training else nullcontext():
            result = self._run_plan(step, parts, args, weights, key, training=training)
        if self.reordering is not None and training:
            self._reorder(self.reordering, len(parts.args))
        with self._executor.failure.watch(f"the end of {step}"):
            report, output = self._finish(step, parts, result, weights, training=training)
            replay(self._module, report, parts.batch_size)
        return report, output

    def _reorder(self, reordering: Reordering, num_microbatches: int) -> None:
        if num_microbatches != self.num_microbatches:
            return
        plan = self._plans.plan(num_microbatches, forward_only=False)
        with self._executor.failure.watch("planning the order of the actions anew"):
            better = reordering.after(plan, self._executor.timeline)
        if better is not None:
            self._plans.use(better)

    def _run_plan(
        self,
        step: str,
        parts: Parts,
        args: Sequence[Any],
        weights: Weights,
        key: tuple[int, ...],
        *,
        training: bool,
    ) -> StepResult:
        self._recorder.begin(parts.sizes if parts.batch_size is not None else [None] * len(parts.sizes))
        forward_only = not training
        plan = self._plans.plan(len(parts.args), forward_only=forward_only)
        if not forward_only:
            self.last_plan, self.batch_size = plan, parts.batch_size
        microbatches: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(args, {}) for args in parts.args]
        try:
            with self._metrics.in_step():
                whole: WholeBatch = ((tuple(args), {}), weights.losses, 1 / weights.accumulate)
                self._split.begin(
                    step, microbatches, weights=weights.gradients if training else None, key=key,
                    replica=self._replica, split_backward=plan.splits_backward,
                    whole=None if weights.settled else whole,
                    sizes=parts.sizes, merge=self._merge,
                )  # fmt: skip
                self._executor.run(plan, self._split.signatures, forward_only=forward_only)
                result = self._split.finish()
        except BaseException:
            self._split.failed()
            raise
        self._warn_once(step, len(parts.args))
        return result

    def _warn_unsplit(self, batch: Any, parts: Parts) -> None:
        if (
            self.num_microbatches > len(parts.args)
            and parts.batch_size is None
            and "batch" not in self._warned
        ):
            self._warned.add("batch")
            rank_zero_warn(
                f"a batch of type {type(batch).__name__} has no tensor and no list to split, so it is one "
                "micro-batch, and the stages work one after the other: override `split_batch(batch, "
                "num_microbatches)` on the LightningModule"
            )

    def _warn_once(self, step: str, num_microbatches: int) -> None:
        untried = self._split.not_tried(step)
        if untried is not None and ("untried", step) not in self._warned:
            self._warned.add(("untried", step))
            rank_zero_warn(
                f"what {step} leaves behind is made from its micro-batches as returned values are, means by "
                "samples and rows joined; whether one device would leave the same could not be tried out. "
                f"This concerns {untried}"
            )
        names = self._split.doubtful(step)
        if names and num_microbatches > 1 and step not in self._warned:
            self._warned.add(step)
            rank_zero_warn(
                f"{step} works out {', '.join(map(repr, names))} from the value before, once for each of "
                f"{num_microbatches} micro-batches, and no rule puts their results together to what one "
                "device has: use self.log or a torchmetrics object, or update it in on_train_batch_end"
            )

    def _finish(
        self,
        step: str,
        parts: Parts,
        result: StepResult,
        weights: Weights,
        *,
        training: bool,
    ) -> tuple[Report, Any]:
        report, output = None, None
        self._split.settle(self._merge)
        if self._split.has_last_stage:
            loss = loss_of_batch(result.losses, result.parts, weights.losses) if training else None
            chosen = (result.losses, weights.losses) if weights.settled and training else ()
            report = self._recorder.report(loss, *chosen)
            output = self._merged(step, result.outputs, parts.sizes)
        report = self._reports.share(step, report)
        self._share_what_is_left(step)
        return report, output

    def _share_what_is_left(self, step: str) -> None:
        """Hooks on every rank, and the next step, read what the end of the step has just left."""
        names, attributes = self._split.late_states(step), self._split.has_late_attributes(step)
        if (names or attributes) and self._from_last.group is not None:
            values, left = self._from_last.share(
                lambda: (late_values(self._module, names), self._split.left_on_last())
            )
            if not self._from_last.is_source:
                put_late_values(self._module, names, values)
                self._split.take_from_last(left)

    def _merged(self, step: str, outputs: list[Any], sizes: list[int]) -> Any:
        if step == "training_step":  # its loss is averaged apart
            outputs = [_extras(output) for output in outputs]
        return self._merge(outputs, sizes) if outputs else None

    def _merge(self, outputs: list[Any], sizes: list[int]) -> Any:
        own: Callable[[list[Any], list[int]], Any] | None = getattr(self._module, "merge_outputs", None)
        return own(outputs, sizes) if own is not None else merge_outputs(outputs, sizes)


def _extras(output: Any) -> Any:
    if isinstance(output, Mapping):
        return {name: value for name, value in output.items() if name != "loss"}
    return None
