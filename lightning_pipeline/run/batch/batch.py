"""One batch of a run: it is split, its plan is run, and every rank gets what Lightning expects of a step."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pipeline.executor import Executor
from lightning_pipeline.hooks import (
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
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.model.state import late_values, put_late_values
from lightning_pipeline.ranks import Outlet
from lightning_pipeline.run.batch.as_one import Compared, extras_of, told_otherwise, with_numbers
from lightning_pipeline.run.batch.parts import Parts, split_arguments
from lightning_pipeline.run.batch.plans import Plans
from lightning_pipeline.run.batch.replan import Replanner
from lightning_pipeline.run.batch.returned import (
    Returned,
    ReturnedNumbers,
    Unmerged,
    as_told,
    merge_of,
    told_of,
    with_returned,
)
from lightning_pipeline.schedules import Plan

_HOOKS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": "on_predict_batch_end",
}


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
    """

    parts: Parts
    seen: Parts
    plan: Plan
    weights: Weights
    result: StepResult

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
            self._warn_without_loss()
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
        self._warn_of_effects()
        self._warn_of_samples()

    def _split(self) -> None:
        steps = self._steps
        at_least = steps.at_least if self.trains else 1
        self.parts = split_arguments(steps.module, self.args, steps.num_microbatches, at_least=at_least)
        total = self.parts.batch_size
        if len(self.parts.args) > 1 and total is not None and not steps.split.fits(self.step, total):
            self.parts = split_arguments(steps.module, self.args, 1)
            self._warn_whole(total)
        elif self.trains:
            self._warn_unsplit()
        asked, sizes = self.accumulate or 1, self.parts.sizes
        if steps.loss_over_batch:
            self.weights = Weights([1.0], asked, settled=True)
            self.seen = Parts([tuple(self.args)], [sum(sizes)], self.parts.batch_size)
        else:
            batches = [batch for batch, *_ in self.parts.args]
            self.weights = weights_of(steps.module, steps.loss_weighting, batches, sizes, asked)
            self.seen = self.parts

    def _begin(self) -> None:
        steps, parts, weights, seen = self._steps, self.parts, self.weights, self.seen
        steps.recorder.begin(seen.sizes if seen.batch_size is not None else [None] * len(seen.sizes))
        steps.returned.begin(self.step, seen.sizes)
        steps.writes.begin(seen.sizes)
        whole: WholeBatch = ((tuple(self.args), {}), weights.losses, 1 / weights.accumulate)
        steps.split.begin(
            self.step, [(args, {}) for args in parts.args],
            weights=weights.gradients if self.trains else None, key=self.key,
            replica=steps.replica, split_backward=self.plan.splits_backward,
            whole=None if weights.settled else whole,
            sizes=parts.sizes, merge=steps.merge, at_once=whole[0],
        )  # fmt: skip

    def _finish(self) -> tuple[Tensor | None, Any]:
        """Merge, and tell all ranks; the loss of the batch, and what the step returned beside."""
        steps = self._steps
        if steps.reordering is not None and self.trains:
            self._reorder(steps.reordering)
        with steps.executor.failure.watch(f"the end of {self.step}"):
            report, output = None, None
            steps.split.settle(steps.merge)
            self._warn_unforeseen()
            if steps.split.has_last_stage:
                report, output = self._told_as_one(self._report(), self._merged())
                if isinstance(output, Unmerged):
                    raise output.error
            report = steps.reports.share(self.step, report)
            self._share_what_is_left()
            steps.split.settled(self.step)
            output = self._told_outputs((extras_of(output) or {}) if self.trains else output)
            replay(steps.module, report, self.parts.batch_size)
        return loss_of(report), output

    def _report(self) -> Any:
        losses, weights = self.result.losses, self.weights
        loss = loss_of_batch(losses, self.result.parts, weights.losses) if self.trains else None
        known = weights.losses if weights.settled else self.result.worth
        chosen = (losses, known) if known is not None and self.trains else ()
        return self._steps.recorder.report(loss, *chosen)

    def _told_as_one(self, report: Report, output: Any) -> tuple[Report, Any]:
        """Compare with what the step tells for the batch as one, in some batches, and take what is sure."""
        split, recorder = self._steps.split, self._steps.recorder
        if split.mixed(self.step) or split.decides_apart(self.step):
            recorder.warn_of_guesses()
            self._steps.returned.warn_of_guesses()
            self.result.say_doubt()
            self._write(None)
            return report, output  # which has been said
        doubtful, left, numbers = split.doubtful(self.step), list[str](), dict[tuple[str, int], float]()
        merged = None if self._steps.merges_itself else output
        found = told_otherwise(report, merged, sum(self.parts.sizes), split.as_one.runs, trains=self.trains)
        for one in found.told:
            if one.mine is None:
                left += [] if one.name is None or one.name in doubtful else [one.name]
            elif one.name is None:
                self._warn_of_loss(one.mine, one.theirs, one.lines)
            elif one.theirs is None or self.step in split.as_one.missed or not found.is_sure:
                recorder.warn_of(one.name, one.mine, one.theirs, one.lines)
            if one.name is not None and one.mine is not None and one.theirs is not None and found.is_sure:
                numbers[one.name, one.nth] = one.theirs
        guessed = {key: number for key, number in found.logged.items() if key[0] in recorder.guesses}
        recorder.warn_of_guesses({name for name, _ in guessed})
        is_compared = found.has_loss if self.trains else found.is_made
        self._warn_in_part(is_compared)
        if not is_compared:
            self.result.say_doubt()
        self._write(found.writes)
        if found.is_sure and (numbers or recorder.guesses):
            split.as_one.each.add(self.step)
        if left:
            self._warn_of_left(left)
        return with_numbers(report, {**guessed, **numbers}), self._returned_as_one(output, found)

    def _write(self, as_one: Sequence[Write] | None) -> None:
        """Give loggers what the step did, once."""
        steps = self._steps
        if not steps.writes.any:
            return
        if as_one is not None:
            steps.split.as_one.each.add(self.step)
        if not steps.writes.write(as_one):
            self._say(
                ("writes", self.step),
                f"{self.step} gives a logger by itself (`self.logger.log_metrics`, `self.logger.experiment`) "
                f"what each of a batch's {len(self.parts.args)} micro-batches has otherwise, and the batch "
                "could not be looked at as one: numbers are means by samples. Use self.log, or write in "
                f"{_HOOKS.get(self.step, 'the hook after the batch')}",
            )

    def _returned_as_one(self, output: Any, found: Compared) -> Any:
        """What the step returns, with what differs for the batch as one from there, where that is sure."""
        as_one, numbers = self._steps.split.as_one, self._steps.returned
        if not found.is_made:
            numbers.warn_of_guesses()
        if found.is_sure and (found.returned or found.may_differ or numbers.guesses):
            as_one.each.add(self.step)
        if found.returned and (self.step in as_one.missed or not found.is_sure):
            self._warn_of_returned(found.returned)
        return with_returned(output, found.returned) if found.is_sure else output

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

    # Warnings

    def _say(self, kind: Hashable, text: str) -> None:
        """Warn, once a run of each kind."""
        if kind not in self._steps.warned:
            self._steps.warned.add(kind)
            rank_zero_warn(text)

    def _warn_unsplit(self) -> None:
        steps, parts = self._steps, self.parts
        more = steps.num_microbatches > len(parts.args)
        if more and parts.batch_size is None:
            self._say(
                "batch",
                f"a batch of type {type(self.args[0]).__name__} has no tensor and no list to split, so it is "
                "one micro-batch, and the stages work one after the other: override `split_batch(batch, "
                "num_microbatches)` on the LightningModule",
            )

    def _warn_of_loss(self, mine: float, theirs: float | None, lines: Sequence[str]) -> None:
        kind = ("loss as one", self.step)
        if kind not in self._steps.warned:
            self._steps.warned.add(kind)
            reads = f"; it reads numbers at {', '.join(lines)}" if lines else ""
            warnings.warn(
                f"what {self.step} returns for a batch is {theirs:.6g} where the code between units runs "
                f"once for all of it, as on one device, and {mine:.6g} from its {len(self.parts.args)} "
                "micro-batches: its loss is made of what each micro-batch has otherwise, so that gradients "
                f"are not those of one device{reads}. Work it out in on_after_batch_transfer, or use "
                "PipelineStrategy(loss_over_batch=True, schedule='GPipe')"
            )

    def _warn_of_returned(self, found: Sequence[Returned]) -> None:
        kind = ("returned as one", self.step)
        if kind not in self._steps.warned:
            self._steps.warned.add(kind)
            parts = ", ".join(
                f"{f'entry {one.name}' if one.name else 'it'} has {one.theirs} there and {one.mine} here"
                for one in found
            )
            warnings.warn(
                f"what {self.step} returns for a batch is something else where the code between units runs "
                f"once for all of it, as on one device, than from its {len(self.parts.args)} micro-batches: "
                f"{parts}. It mixes what the model gives for several samples (`h - h.mean(0)`, "
                f"`h.softmax(0)`): return the model's values as they are, and work it out in "
                f"{_HOOKS.get(self.step, 'the hook after the batch')}, which is given the whole batch's, "
                "or override merge_outputs(outputs, sizes)"
            )

    def _warn_of_values(self, mixed: Mapping[str, str]) -> None:
        kind = ("values", self.step)
        if mixed and kind not in self._steps.warned:
            self._steps.warned.add(kind)
            lines = ", ".join(f"{name} at {line}" for line, name in mixed.items())
            warnings.warn(
                f"{self.step} mixes what layers gave for several samples of the batch before another layer "
                f"({lines}), as manifold mixup does, and each of {len(self.parts.args)} micro-batches mixes "
                "its own samples, so that numbers are not those of one device: use num_microbatches=1, or "
                "mix samples in on_after_batch_transfer, before the first layer"
            )

    def _warn_of_units(self, units: Sequence[str]) -> None:
        new = [unit for unit in units if ("unit", self.step, unit) not in self._steps.warned]
        if new:
            self._steps.warned |= {("unit", self.step, unit) for unit in new}
            warnings.warn(
                f"in {self.step} the forward of {', '.join(new)} mixes the samples that it is given, as "
                "`h - h.mean(0)`, a deviation over the batch and experts with a capacity do. It is given "
                f"each of {len(self.parts.args)} micro-batches by itself, so that numbers are not those of "
                "one device: use num_microbatches=1, or write the layer so that a sample's output follows "
                "from this sample. loss_over_batch=True does not change it. If statistics of fewer samples "
                "are what you want, as each replica has its own under DDP, leave it so"
            )

    def _warn_of_left(self, names: Sequence[str]) -> None:
        kind = ("left as one", self.step)
        if kind not in self._steps.warned:
            self._steps.warned.add(kind)
            warnings.warn(
                f"{self.step} leaves another number in {', '.join(map(repr, names))} than one device, where "
                "the code between units runs once for the whole batch: it is put together from those of "
                f"{len(self.parts.args)} micro-batches. Work it out in on_train_batch_end from what the step "
                "returns, or use self.log or a torchmetrics object"
            )

    def _warn_without_loss(self) -> None:
        if self._steps.module.automatic_optimization:
            self._say(
                "loss",
                f"{self.step} returned no loss for any of a batch's {len(self.parts.args)} micro-batches, so "
                "that no stage ran a backward and this batch trains nothing: return the loss, or a "
                "dictionary with 'loss', unless that was on purpose",
            )

    def _warn_whole(self, total: int) -> None:
        self._say(
            "rows",
            f"a batch of {total} samples is one micro-batch, for {self.step} has left rows of another "
            "number of samples in an attribute, and may read them: use `drop_last=True`, or delete what "
            "no later batch reads in `on_train_batch_end`",
        )

    def _warn_unforeseen(self) -> None:
        step = self.step
        names = self._steps.split.unforeseen(step)
        if names and self._steps.from_last.group is not None:
            self._say(
                ("unforeseen", step),
                f"{step} has changed {', '.join(map(repr, names))} on the last stage alone, and for each "
                "micro-batch by itself, as if something decided so that nobody sees: a value that the model "
                "computes (`if loss < 0.1`), a list that the number of a step is the index of, the clock. "
                "Decide by what it returns, in on_train_batch_end or another hook, which every rank runs",
            )
        divided = self._steps.split.divided
        if divided:
            self._say(
                ("divided", step),
                f"{step} has changed {', '.join(map(repr, divided))} for some micro-batches of a batch and "
                "not for others, as values that the model computes decide (`if loss < 0.1`), where one "
                "device decides once for the batch: decide by what it returns, in a hook such as "
                "on_train_batch_end",
            )

    def _warn_of_effects(self) -> None:
        """Of what a step leaves behind, where it may not be what one device leaves."""
        step, number = self.step, len(self.parts.args)
        split = self._steps.split
        untried = split.not_tried(step)
        if untried is not None:
            self._say(
                ("untried", step),
                f"what {step} leaves behind is made from its micro-batches as returned values are, means by "
                "samples and rows joined; whether one device would leave the same could not be tried out. "
                f"This concerns {untried}",
            )
        counts = split.decided_by(step)
        if counts:
            self._say(
                ("counts", step),
                f"{step} adds up {', '.join(map(repr, counts))} over samples and decides by the sum (`if "
                "self.seen + len(x) <= size`): each micro-batch decides by what it has added itself, one "
                "device by the whole batch. Decide before adding, or in on_train_batch_end",
            )
        names = split.doubtful(step)
        if names and number > 1:
            self._say(
                ("doubtful", step),
                f"{step} works out {', '.join(map(repr, names))} from the value before, once for each of "
                f"{number} micro-batches, and no rule puts their results together to what one "
                "device has: use self.log or a torchmetrics object, or update it in on_train_batch_end",
            )

    def _mixes(self, lines: Mapping[str, str]) -> str:
        places = ", ".join(f"{name} at {line}" for line, name in lines.items())
        return (
            f"{self.step} mixes samples of the batch with each other, or goes by a number of all of them or "
            f"by their place ({places}), and each of {len(self.parts.args)} micro-batches has its own. Where "
            "partners are drawn (mixup by a permutation) that draws them from fewer samples; otherwise the "
            "numbers are not those of one device, unless the step puts the samples back in order: do "
            "it in on_after_batch_transfer, which sees the batch"
        )

    def _warn_in_part(self, is_compared: bool) -> None:
        """Where micro-batches have their own of some of what is mixed, and no look at the batch compares."""
        mixed, kind = self._steps.split.mixed_in_part(self.step), ("mixed", self.step)
        if mixed and kind not in self._steps.warned:
            self._steps.warned.add(kind)
            if not is_compared:
                warnings.warn(self._mixes(mixed))

    def _warn_of_samples(self) -> None:
        """Of what a step makes of several samples, of which a micro-batch has fewer."""
        step, number = self.step, len(self.parts.args)
        split = self._steps.split
        mixed = split.mixed(step)
        if number > 1:
            self._warn_of_units(split.mixing_units(step))
        if number > 1 and not mixed:
            self._warn_of_values(split.mixed_values(step))
        if mixed and number > 1:
            self._say(("mixed", step), self._mixes(mixed))
        if split.decides_apart(step):
            self._say(
                ("apart", step),
                f"{step} decides by what is in the batch (`if x.sum() > 0`), and the {number} micro-batches "
                "of one have decided differently, where one device decides once for all of its samples: "
                "decide in on_after_batch_transfer, or sample by sample with torch.where",
            )
