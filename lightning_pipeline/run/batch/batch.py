"""One batch of a run: it is split, its plan is run, and every rank gets what Lightning expects of a step."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.executor import Executor
from lightning_pipeline.hooks import (
    Entry,
    LogRecorder,
    Report,
    ReportChannel,
    SharedMetrics,
    StepWrites,
    Write,
    loss_of,
    replay,
    tell_of_units,
)
from lightning_pipeline.measure import PipelineRun
from lightning_pipeline.model.loss import Weights, loss_of_batch, weights_of
from lightning_pipeline.model.replay import StepResult, WholeBatch
from lightning_pipeline.model.split import Doubts, SplitModel
from lightning_pipeline.model.state import late_values, put_late_values
from lightning_pipeline.ranks import Outlet
from lightning_pipeline.run.batch.advice import Advice
from lightning_pipeline.run.batch.as_one import (
    Compared,
    extras_of,
    told_otherwise,
    with_batch_sizes,
    with_more,
    with_numbers,
)
from lightning_pipeline.run.batch.parts import Parts, SharedPlaces, split_again, split_arguments
from lightning_pipeline.run.batch.plans import Plans
from lightning_pipeline.run.batch.replan import Replanner
from lightning_pipeline.run.batch.returned import (
    ChangedBatch,
    ReturnedNumbers,
    as_told,
    changed,
    checked,
    merge_of,
    take,
    told_of,
)
from lightning_pipeline.schedules import Plan


@dataclass
class Steps:
    """What the batches of a run have in common.

    Attributes:
        module: The LightningModule.
        split: Its stages on this rank.
        executor: Runs plans on them.
        run: Is told of each training batch.
        plans: For any number of micro-batches.
        recorder: Where the last stage's `self.log` goes.
        writes: What steps give to loggers by themselves.
        metrics: Those of the module.
        replica: Of this rank.
        from_last: From the last stage's rank to the others.
        group: Of these ranks, for tensors on the device.
        loss_weighting: Of the strategy.
        loss_over_batch: Of the strategy.
        num_microbatches: What a batch is cut into.
        at_least: Samples that each micro-batch of a training batch should have.
        reads_outputs: Whether a hook of any rank may read what an evaluating step returned.
        reordering: Plans the training batches anew, once it has seen some.
        warned: Of what a warning has been given.
        shared: By step, places of its batches that all samples share.
        reports: From the last stage to the others.
        returned: Puts numbers together that steps return.
    """

    module: LightningModule
    split: SplitModel
    executor: Executor
    run: PipelineRun
    plans: Plans
    recorder: LogRecorder
    writes: StepWrites
    metrics: SharedMetrics
    replica: int
    from_last: Outlet
    group: dist.ProcessGroup
    loss_weighting: str
    loss_over_batch: bool
    num_microbatches: int
    at_least: int
    reads_outputs: Callable[[str], bool] = lambda step: False
    reordering: Replanner | None = None
    warned: set[Hashable] = field(default_factory=set)
    shared: dict[str, SharedPlaces] = field(default_factory=dict)
    reports: ReportChannel = field(init=False)
    returned: ReturnedNumbers = field(init=False)

    def __post_init__(self) -> None:
        split, recorder = self.split, self.recorder
        self.reports = ReportChannel(self.from_last, split.told.device, self.group)
        self.returned = ReturnedNumbers(self.module, split.part)
        recorder.part_of = split.part
        split.told.returned, split.told.returned_of_whole = self.returned.take, self.returned.take_of_whole
        split.told.of_whole, split.told.of_whole_begins = recorder.log_of_whole, self._whole_begins

    def _whole_begins(self) -> None:
        self.recorder.whole_begins()
        self.returned.whole_begins()

    def cut(self, step: str, args: Sequence[Any], *, at_least: int = 1) -> Parts:
        """A batch, split; one that cannot be, after others of the step that could, is one micro-batch.

        Args:
            step: Name of the user's method.
            args: Its arguments.
            at_least: Samples that each part should have.
        """
        split = split_again if step in self.shared else split_arguments
        shared = self.shared.get(step, SharedPlaces())
        parts = split(self.module, step, args, self.num_microbatches, at_least=at_least, shared=shared)
        self.shared[step] = shared
        return parts

    @property
    def merges_itself(self) -> bool:
        """Whether the user has a `merge_outputs`."""
        return hasattr(self.module, "merge_outputs")

    def merge(self, outputs: list[Any], sizes: list[int]) -> Any:
        """One value of one per micro-batch, as the user's `merge_outputs` has it, or ours."""
        return merge_of(self.module)(outputs, sizes)


class Batch:
    """One batch on its way through a step; `train` or `evaluate` runs it, once.

    Args:
        steps: Of the run.
        step: Name of the user's method.
        args: Its arguments.
        key: Of the random numbers: which batch of the run it is.
        accumulate: Batches that one optimizer step adds up; the gradients are divided by it. `None`: no
            backward follows.

    Attributes:
        parts: The batch, split, once it runs.
        plan: What is run.
        seen: The parts that have a loss, outputs and logs: the same, or one for all of the batch.
        weights: What the loss of each of these counts for.
        result: What the stages of this rank have made of it.
        doubts: What of it may not be one device's.
    """

    parts: Parts
    seen: Parts
    plan: Plan
    weights: Weights
    result: StepResult
    doubts: Doubts

    def __init__(
        self,
        steps: Steps,
        step: str,
        args: Sequence[Any],
        key: tuple[int, ...],
        accumulate: int | None = None,
    ) -> None:
        self._steps, self.step, self.args, self.key = steps, step, args, key
        self.accumulate = accumulate
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.around_backwards: Callable[[], AbstractContextManager[None]] = nullcontext
        self._is_left_out = False
        self.scale_gradients: Callable[[Tensor | float], None] = lambda factor: None
        self.accumulates: Callable[[], int | None] = lambda: accumulate

    @property
    def advice(self) -> Advice:
        """Says what is to be said of this batch."""
        steps, others = self._steps, self._steps.from_last.group is not None
        return Advice(self.step, len(self.parts.args), steps.warned, has_others=others)

    @property
    def trains(self) -> bool:
        """Whether a backward follows."""
        return self.accumulate is not None

    def train(self) -> dict[str, Any] | None:
        """Run a training step, backward included.

        Returns:
            `loss`, that of the whole batch, detached, on every rank, and what else the step returned: on all
            ranks where it is small, else on the last stage, with what raises when it is used in its place
            elsewhere. `None` where no micro-batch has a loss.
        """
        with self.around():
            with self.around_backwards(), self._open():
                self._steps.executor.run(self.plan, self._steps.split.signatures)
            loss, output = self._finish()
        if loss is None:
            if self._steps.module.automatic_optimization and not self._is_left_out:
                self.advice.without_loss()
            return None
        return {"loss": loss, **output}

    def evaluate(self) -> Any:
        """Run a step of validation, test or predict.

        Returns:
            On the last stage what the step returned, merged; elsewhere `None`, or where a hook may read it
            the same as of `train`.
        """
        with self.around():
            with self._open():
                self._steps.executor.run(self.plan, self._steps.split.signatures)
            output = self._finish()[1]
        return output

    # Before the plan runs, and after

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Around the plan: the batch is split and begun, and ended or dropped."""
        steps = self._steps
        self._split()
        self.plan = steps.plans.plan(len(self.parts.args), forward_only=not self.trains)
        if self.trains:
            steps.run.last_plan, steps.run.batch_size = self.plan, self.parts.batch_size
        try:
            with steps.metrics.in_step(), self.parts.explained(self.args[0]):
                self._begin()
                yield
                self.result = steps.split.finish()
        except BaseException:
            steps.split.failed()
            raise
        self.doubts = steps.split.doubts(self.step)
        self.advice.of_effects(self.doubts)
        self.advice.of_samples(self.doubts, later=self._is_compared_later)
        if not self.weights.settled:
            self.advice.of_numbers(self.doubts.numbers)

    def _split(self) -> None:
        steps = self._steps
        self.parts = steps.cut(self.step, self.args, at_least=steps.at_least if self.trains else 1)
        total, several = self.parts.batch_size, len(self.parts.args) > 1
        if self.parts.refusal is not None:
            self.advice.not_cut(self.parts.refusal)
        elif several and total is not None and not steps.split.fits(self.step, total):
            self.parts = split_arguments(steps.module, self.step, self.args, 1)
            self.advice.whole(total)
        elif self.trains and total is None and steps.num_microbatches > len(self.parts.args):
            self.advice.unsplit(self.args[0])
        asked, sizes = self.accumulate or 1, self.parts.sizes
        if steps.loss_over_batch:
            self.weights = Weights([1.0], asked, settled=True)
            self.seen = Parts([tuple(self.args)], [sum(sizes)], self.parts.batch_size)
        else:
            batches = [batch for batch, *_ in self.parts.args]
            how = steps.loss_weighting if self.trains else None
            self.weights = weights_of(steps.module, how, batches, sizes, asked)
            self.seen = self.parts

    def _begin(self) -> None:
        steps, parts, weights, seen = self._steps, self.parts, self.weights, self.seen
        steps.recorder.begin(seen.sizes if seen.batch_size is not None else [None] * len(seen.sizes))
        steps.returned.begin(self.step, seen.sizes)
        steps.writes.begin(seen.sizes)
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = (tuple(self.args), {})
        total = sum(parts.sizes)
        fractions = [size / total for size in parts.sizes]
        whole = WholeBatch(arguments, fractions, 1 / weights.accumulate, is_weighed=weights.settled)
        with steps.split.findings.held():
            steps.split.begin(
                self.step, [(args, {}) for args in parts.args],
                weights=weights.gradients if self.trains else None, key=self.key,
                replica=steps.replica, split_backward=self.plan.splits_backward,
                whole=None if steps.loss_over_batch else whole,
                sizes=parts.sizes, merge=steps.merge, at_once=arguments,
            )  # fmt: skip

    def _finish(self) -> tuple[Tensor | None, Any]:
        """Merge, and tell all ranks; the loss of the batch, and what the step returned beside."""
        steps = self._steps
        if steps.reordering is not None and self.trains:
            self._reorder(steps.reordering)
        with steps.executor.failure.watch(f"the end of {self.step}"):
            report, output = None, None
            steps.split.settle(steps.merge)
            self.advice.unforeseen(steps.split.unforeseen(self.step), self.doubts)
            if steps.split.has_last_stage:
                if steps.split.is_unlike:
                    steps.recorder.whole_is_unlike()
                    steps.returned.whole_is_unlike()
                with steps.metrics.local():  # some are called only now
                    report, output = self._told_as_one(self._report(), self._merged())
                output = checked(output)
            steps.metrics.tell_attributes()
            report = steps.reports.share(self.step, report)
            if report.factor is not None:
                self.scale_gradients(report.factor)
            self._share_what_is_left()
            steps.split.settled(self.step)
            self._divide_anew()
            output = self._told_outputs((extras_of(output) or {}) if self.trains else output)
            self._change_batch()
            replay(steps.module, report)
        return loss_of(report), output

    def _divide_anew(self) -> None:
        """A step may say over how many batches gradients add up, which Lightning reads after it."""
        after = self.accumulates()
        if self.accumulate and after and after != self.accumulate:
            self.scale_gradients(self.accumulate / after)

    def _report(self) -> Any:
        losses, weights = self.result.losses, self.weights
        loss = loss_of_batch(losses, self.result.parts, weights.losses) if self.trains else None
        are_weighed = weights.settled and all(part is None for part in self.result.parts)
        known = weights.losses if are_weighed else self.result.worth
        chosen = (losses, known) if known is not None and self.trains else ()
        if loss is None or self.result.factors is None:
            return self._steps.recorder.report(loss, *chosen)
        of_loss, of_gradients = self.result.factors
        return self._steps.recorder.report(loss * of_loss, *chosen).scaling(of_gradients)

    def _told_as_one(self, report: Report, output: Any) -> tuple[Report, Any]:
        """Compare with what the step tells for the batch as one, in some batches, and take what is sure."""
        split, recorder = self._steps.split, self._steps.recorder
        mixes = self.doubts.mixes and len(self.parts.args) > 1
        found, looks = Compared(), not mixes or self._is_compared_later  # else of mixing it has been said
        if looks:
            merged = None if self._steps.merges_itself else output
            left, samples = split.left(), sum(self.parts.sizes)
            with split.findings.held():
                found = told_otherwise(
                    report, merged, left, samples, split.as_one.runs, trains=self.trains,
                    is_filled=lambda: split.as_one.is_filled, twice=lambda: split.told.calls.asks_again,
                )  # fmt: skip
        if split.release_metrics(is_sure=found.is_sure):
            split.as_one.each.add(self.step)
        if self.step in split.as_one.kept and not found.is_sure:
            self.advice.of_kept()
        numbers = self._numbers_of(found)
        guessed = {key: number for key, number in found.logged.items() if key[0] in recorder.guesses}
        recorder.warn_of_guesses({name for name, _ in guessed})
        is_compared = found.has_loss if self.trains else found.is_made
        if looks:
            self.advice.in_part(self.doubts.in_part, is_compared=is_compared)
        same = is_compared and all(one.name is not None for one in found.told)
        if report.num_values and (same or not is_compared):  # else nothing is weighed
            self.result.say_doubt(is_settled=same)
        if mixes and looks:
            apart = self.doubts.are_units_apart
            settled = same and not apart if self.doubts.decides_apart else is_compared
            self._settle_mixing(settled and (self.trains or found.is_sure))
        self._write(found.writes)
        self._leave(found, is_compared=is_compared)
        if found.is_sure and (numbers or recorder.guesses):
            split.as_one.each.add(self.step)
        before, report = report, with_batch_sizes(report, found.batch_sizes)
        if report is not before:
            split.as_one.each.add(self.step)
        report = with_more(with_numbers(report, {**guessed, **numbers}), self._more_of(found))
        if self.trains and self._is_none_for_some(found, is_compared=is_compared):
            report = report.without_loss()
        return report, self._returned_as_one(output, found)

    def _is_none_for_some(self, found: Compared, *, is_compared: bool) -> bool:
        """Whether the batch as one has no loss, as some of its micro-batches had none; else says so."""
        without = sum(loss is None for loss in self.result.losses)
        if not 0 < without < len(self.result.losses):
            return False
        self._steps.split.as_one.each.add(self.step)
        self._is_left_out = found.is_sure and found.is_none
        if not (self._is_left_out or is_compared):
            self.advice.some_without_loss(without)
        return self._is_left_out

    def _numbers_of(self, found: Compared) -> dict[tuple[str, int], float]:
        """Logged numbers that are taken from the batch as one; warns of what else differs."""
        split, numbers = self._steps.split, dict[tuple[str, int], float]()
        weighed = self._steps.recorder.weighed
        for one in found.told:
            if (one.name, one.nth) in weighed:
                continue  # the loss, which the user has weighed
            if one.name is None:
                self.advice.of_loss(one.mine, one.theirs, one.lines)
            elif one.is_unknown and (one.name, one.nth) in self._steps.recorder.followed:
                continue  # an earlier layer gave what it is made of, which is not kept
            elif one.theirs is None or self.step in split.as_one.missed or not found.is_sure:
                self._steps.recorder.warn_of(one.name, one.mine, one.theirs, one.lines)
            if one.name is not None and one.theirs is not None and found.is_sure:
                numbers[one.name, one.nth] = one.theirs
        return numbers

    def _more_of(self, found: Compared) -> list[tuple[Entry, Tensor]]:
        """What the batch as one logs and its micro-batches do not; warns where that is not sure."""
        as_one = self._steps.split.as_one
        known = [one for one in found.more if found.is_sure and one[1] is not None]
        if found.more:
            as_one.each.add(self.step)
        if len(known) < len(found.more) or (known and self.step in as_one.missed):
            self.advice.of_more([name for name, *_ in found.more])
        return [self._steps.recorder.of_one(*one) for one in known]

    def _leave(self, found: Compared, *, is_compared: bool) -> None:
        """Leave behind what the batch as one does, where that is sure."""
        split, labels = self._steps.split, {one.place[0]: one for one in found.left}
        self.advice.of_states(self.doubts.states)  # which units may have read, so that theirs are others
        sums = [*self.doubts.decided_by, *self.doubts.sums_read]
        if not (found.is_sure and (is_compared or not self.doubts.decided_by)):
            self.advice.of_counts(sums if len(self.parts.args) > 1 else [])  # one micro-batch adds all
        elif labels or self.doubts.has_unknown or self.doubts.states or sums:
            split.as_one.each.add(self.step)
        self.advice.divided([one for one in split.divided if not (found.is_sure and one in found.compared)])
        self.advice.divided_gradients([one for one, is_read in split.divided.items() if is_read])
        if found.is_sure:
            split.put_left(found.left_as_one)
        said = [label for label in labels if label not in self.doubts.states]
        if said and (self.step in split.as_one.missed or not found.is_sure):
            self.advice.of_left(said)

    def _settle_mixing(self, is_settled: bool) -> None:
        """Look at each batch of a step that mixes samples at its end; else say that it does."""
        if is_settled:
            self._steps.split.as_one.each.add(self.step)
        else:
            self.advice.of_mixing(self.doubts)

    def _write(self, as_one: Sequence[Write] | None) -> None:
        """Give loggers what the step did, once."""
        steps = self._steps
        if not steps.writes.any:
            return
        if as_one is not None:
            steps.split.as_one.each.add(self.step)
        if not steps.writes.write(as_one):
            self.advice.of_writes()

    def _returned_as_one(self, output: Any, found: Compared) -> Any:
        """What the step returns, with what differs for the batch as one from there, where that is sure."""
        as_one, numbers = self._steps.split.as_one, self._steps.returned
        if not found.is_made:
            numbers.warn_of_guesses()
        matters = found.is_sure and (found.returned or found.may_differ or numbers.guesses)
        if matters or found.replaces(output):
            as_one.each.add(self.step)
        if found.returned and (self.step in as_one.missed or not found.is_sure):
            self.advice.of_returned(found.returned)
        return found.into(output)

    def _merged(self) -> Any:
        outputs = self.result.outputs
        if self.step == "training_step":  # its loss is averaged apart
            outputs = [extras_of(output) for output in outputs]
        return self._steps.returned.merged(outputs, self.seen.sizes) if outputs else None

    def _told_outputs(self, output: Any) -> Any:
        """What hooks are given of what the step returned: all of it, or what the last stage has told."""
        steps, from_last = self._steps, self._steps.from_last
        is_read = steps.split.returns_more(self.step) if self.trains else steps.reads_outputs(self.step)
        if not is_read or from_last.group is None:
            return output
        told = from_last.share(lambda: told_of(output))
        return output if from_last.is_source else as_told(told, self.step, steps.module.device)

    def _change_batch(self) -> None:
        """Hooks find the batch as the step has left it."""
        steps, batch, from_last = self._steps, self.args[0] if self.args else None, self._steps.from_last
        is_last, changes = steps.split.has_last_stage, self.result.batch_changes
        if not steps.split.known[self.step].changes_batch and from_last.group is not None:
            self.advice.unforeseen(["the batch"] if any(changes) else [], self.doubts)
            return

        def told() -> ChangedBatch:
            own = getattr(steps.module, "split_batch", None) is not None
            parts = [args[0] for args in self.seen.args] if own else []
            return changed(batch, self.step, changes, parts, self.seen.sizes)

        found = told() if from_last.group is None else from_last.share(told)
        if not is_last and not take(batch, found, self.step, steps.module.device, changes, self.seen.sizes):
            self.advice.written_apart()
        changes.clear()

    def _share_what_is_left(self) -> None:
        """Hooks on every rank, and the next step, read what the end of the step has just left."""
        split, module, from_last = self._steps.split, self._steps.module, self._steps.from_last
        names, attributes = split.late_states(self.step), split.has_late_attributes(self.step)
        if (names or attributes) and from_last.group is not None:
            whole: tuple[tuple[Any, ...], dict[str, Any]] = (tuple(self.args), {})
            values, left = from_last.share(
                lambda: (late_values(module, names), split.left_on_last(self.step, whole))
            )
            if not from_last.is_source:
                put_late_values(module, names, values)
                split.take_from_last(left)
        if split.in_units.tells(self.step):
            tell_of_units(split.in_units, from_last.company)
        if self.trains and split.retains():
            told = from_last.company.gather("sharing gradients that the step retains", split.retained())
            split.take_gradients(list(told.values()))

    def _reorder(self, reordering: Replanner) -> None:
        steps = self._steps
        if len(self.parts.args) != steps.num_microbatches:
            return
        with steps.executor.failure.watch("planning the order of the actions anew"):
            better = reordering.after(self.plan, steps.executor.timeline)
        if better is not None:
            steps.plans.use(better)

    @property
    def _is_compared_later(self) -> bool:
        """Whether what the batch as one tells says if mixing matters, for it comes after the last unit.

        Micro-batches' losses were found to add up to the batch's, and what else is told is taken from there.
        Where they have only decided differently, what they tell together is compared with what it tells.
        """
        adds_up = not self.trains or not self.doubts.mixed or self.result.worth is not None
        return adds_up and self.doubts.at_end
