"""How long each stage worked and waited, measured."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.callbacks.detaching import DetachingCallback
from lightning_pipeline.callbacks.publishing import Publisher, check_counts
from lightning_pipeline.measure import (
    Exchange,
    Gathered,
    Measurement,
    Meter,
    Report,
    run_of,
    stage_names,
)

_WARM_UP = 2  # the first steps pay for caches and allocations; they are not in the table
_UNLOGGED = 50  # batches between two comparisons where nothing is logged

Hook = TypeVar("Hook", bound=Callable[..., None])


def _counted(hook: Hook) -> Hook:
    """A hook whose time is added to `seconds_inside`."""

    @wraps(hook)
    def counted(self: "BubbleMonitor", *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        try:
            hook(self, *args, **kwargs)
        finally:
            self.seconds_inside += time.perf_counter() - begin

    return cast(Hook, counted)


class BubbleMonitor(DetachingCallback):
    """Measures, for every rank and step, what the time goes to.

    Logged under the same keys on every rank, means over the steps since the last time and over the replicas:

    * `pipeline/bubble_fraction`: idle share of all rank-time in the schedule's makespan, which is from the
      first start of an action on any rank to the last end, on aligned clocks. Progress bar: `bubble`.
    * `pipeline/bubble_fraction_simulated`: the same by the simulator, with the median times of the actions as
      they were measured and messages that cost nothing. What is measured beyond it is communication and rest.
    * `pipeline/bubble_fraction_equal_stages`: the same, were all stages alike. What the simulation has beyond
      it is imbalance; `pipeline/slowest_stage` is the stage to relieve. This much is the schedule's own.
    * `pipeline/step_time_s`: from the end of a batch to the end of the next, the mean over the ranks. After a
      validation and at the start of an epoch, from where the batch is fetched.
    * `pipeline/makespan_s`: of the schedule within the step.
    * `pipeline/stage_0/idle_s`: the part of the makespan in which the rank ran no action; and so for every
      stage (`stages_0_2` where a rank holds several).
    * `pipeline/stage_0/...`, which add up to the rank's step: `forward_s`; `backward_s`, or
      `input_gradient_s` and `weight_gradient_s`, as the schedule has them; `waiting_start_s`, for the first
      input, from when both this rank and the first one had begun; `waiting_steady_s`, for the inputs of later
      actions; `waiting_drain_s`, from the rank's last action to the end of the makespan, whatever it does
      besides; `data_s`, for the loader and the way to the device; `optimizer_s`, for averaging and clipping
      gradients and the optimizer's step; `other_s`, for hooks, logging, packing messages, and ranks that
      begin their step late.

    A table closes `fit`, with one line of advice where a change would pay.

    On a GPU the times are those of its stream: events are recorded in a step and read in the next one.

    Args:
        every_n_steps: Batches between two measurements that are logged at once, for which ranks wait for each
            other. Default: where Lightning logs, by the Trainer's `log_every_n_steps`; the ranks' figures
            travel while the next batch runs and are logged at its end, under the step that they are of. What
            an epoch has not logged by its end is logged then.
        per_stage: Whether to log the figures of each stage, twenty keys each; if not, the totals alone.
        every_n_epochs: Epochs between two tables, each of all steps so far. Default: only the one at the end
            of `fit`.

    Attributes:
        seconds_inside: Time that this callback has taken on this rank.

    Raises:
        ConfigurationError: A number is not a whole one from 1 on.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        every_n_epochs: int | None = None,
        per_stage: bool = True,
    ) -> None:
        check_counts(self, every_n_steps=every_n_steps, every_n_epochs=every_n_epochs)
        self.every_n_epochs, self.per_stage = every_n_epochs, per_stage
        self.seconds_inside = 0.0
        self._publisher = Publisher(every_n_steps)
        self._meter: Meter | None = None
        self._exchange: Exchange | None = None
        self._total: Measurement | None = None
        self._early: Measurement | None = None
        self._unpublished: Measurement | None = None
        self._reported: Measurement | None = None
        self._names: list[str] = []
        self._batches = 0

    @override
    @_counted
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = run_of(trainer, self)
        self.detach()
        self._meter, self._batches = Meter(run, trainer), 0
        self._exchange = run.exchange
        self._total = self._early = self._unpublished = self._reported = None
        self._names = stage_names(run.gather_from_pipeline(run.stages_here))

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._publisher.owes = True
        self._measuring.batches.pause()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:  # the sanity check comes before training
            self._settle(trainer)
            self._meter.batches.pause()

    @override
    @_counted
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._exchange is not None:
            self._exchange.send()
        if self._batches == _WARM_UP:
            self._measuring.drop()
        self._measuring.begin_batch()

    @override
    @_counted
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._measuring.batches.close()

    @override
    @_counted
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._measuring.batches.close()

    @override
    @_counted
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measuring.batches.gradients_done()

    @override
    @_counted
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._exchange is not None:
            self._exchange.receive()
        self._measuring.end_batch(batch)
        self._batches += 1
        due = self._publisher.is_due(run_of(trainer, self), trainer, self._batches)
        if self._publisher.every_n_steps is None:
            if due or self._batches % _UNLOGGED == 0:
                self._tell(trainer, due)
        elif due or self._batches % _UNLOGGED == 0:
            self._collect()
            if due:
                self._publish(trainer)

    def _tell(self, trainer: Trainer, due: bool) -> None:
        """Have this rank's steps compared with those of the others while the next batch runs."""
        window, early, step = self._measuring.window(), self._batches <= _WARM_UP, self._publisher.step

        def compare(gathered: Gathered) -> None:
            assert window is not None, "there are steps"
            self._take(window.compared(gathered), early)
            if due:
                self._publish(trainer, step)

        if window is not None and self._exchange is not None:
            self._exchange.tell(window.numbers, compare)
            self._publisher.owes = self._publisher.owes and not due

    def _collect(self, *, last: bool = False) -> None:
        if self._exchange is not None:
            self._exchange.finish()
        measured = self._measuring.collect(last=last)
        if measured is not None:
            self._take(measured, self._batches <= _WARM_UP)

    def _take(self, measured: Measurement, early: bool) -> None:
        self._unpublished = measured if self._unpublished is None else self._unpublished + measured
        if early:
            self._early = measured
        else:
            self._total = measured if self._total is None else self._total + measured

    def _publish(self, trainer: Trainer, step: int | None = None) -> None:
        measured, self._unpublished = self._unpublished, None
        if measured is not None:
            found = measured.values(self._names, per_stage=self.per_stage)
            values = {f"pipeline/{key}": value for key, value in found.items()}
            self._publisher.publish(run_of(trainer, self), trainer, values, step)
            trainer.progress_bar_metrics["bubble"] = measured.bubble

    @_counted
    def _settle(self, trainer: Trainer) -> None:
        """Log an epoch that has not been, for callbacks that look at its end or after a validation."""
        if self._exchange is not None:
            self._exchange.finish()
        if self._publisher.owes and not trainer.barebones:
            self._collect(last=True)
            self._publish(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(trainer)
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._report(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer)
        self.detach()

    def _report(self, trainer: Trainer) -> None:
        self._collect(last=True)
        total = self._total or self._early
        if total is None or total is self._reported:
            return
        self._reported = total
        report = Report(
            run_of(trainer, self), total, self._measuring, self._names,
            warm=self._total is not None, ranks_here=trainer.num_devices,
        )  # fmt: skip
        if trainer.is_global_zero:
            rank_zero_info(str(report))

    @override
    def detach(self) -> None:
        """Let go of the meter."""
        if self._exchange is not None:
            self._exchange.drop()
            self._exchange = None
        if self._meter is not None:
            self._meter.detach()
            self._meter = None

    @property
    def _measuring(self) -> Meter:
        assert self._meter is not None, "training has started"
        return self._meter
