"""How much memory each stage takes, measured, beside what the plan says."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pipeline.callbacks.publishing import Publisher, check_counts
from lightning_pipeline.measure import (
    Exchange,
    Gathered,
    MeasuredMemory,
    StageMemory,
    numbers_in,
    run_of,
    stage_names,
    with_numbers,
)
from lightning_pipeline.model.cut import size_text, text_table
from lightning_pipeline.model.tensors import Held

_GIB = 2.0**30
_UNCOUNTED = 49  # batches at least between two in which activations are counted, unless asked for


class StageMemoryMonitor(Callback):
    """Measures what each stage has in memory, and compares activations with the plan.

    Logged under the same keys on every rank, of data-parallel replicas the most. Per stage, as
    `pipeline/stage_0/...`: `parameters`, a count; `parameters_gib`, `gradients_gib` and
    `optimizer_state_gib`; `activations_gib` and `activation_microbatches`, what was held at the worst moment
    of a step between forwards and backwards, and `activations_planned_gib`. Per rank, under `stage_0`, or
    `stages_0_2` where it holds several: `buffers_gib`, the most that buffers of messages took, and
    `peak_memory_gib`, the allocator's peak on a GPU and the process' largest resident set on CPU, libraries
    and data included; with several stages also their `activations_gib` and `activations_planned_gib`
    together. A table closes `fit`.

    Activations are counted through the tensors that autograd saves. That takes about a tenth of a step on
    CPU, so it is done in the first step and in some of those that are logged; other steps are left alone and
    log what was counted last. Parameters, buffers and the batch do not count as activations.

    Args:
        every_n_steps: Batches between two measurements that are logged at once, with activations counted in
            each. Default: where Lightning logs, by the Trainer's `log_every_n_steps`, at the end of the next
            batch and under the step that they are of, with activations counted every 50 batches or more.
            What an epoch has not logged by its end is logged then, the most of the fit so far.

    Raises:
        ConfigurationError: A number is not a whole one from 1 on.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        check_counts(self, every_n_steps=every_n_steps)
        self._publisher = Publisher(every_n_steps)
        self._names: list[str] = []
        self._ranks: list[MeasuredMemory] = []
        self._exchange: Exchange | None = None
        self._batches = self._counted = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = run_of(trainer, self)
        self._batches = self._counted = 0
        self._ranks, self._exchange = run.gather_from_pipeline(run.memory.worst()), run.exchange
        self._names = stage_names([[stage.stage for stage in rank.stages] for rank in self._ranks])
        run.memory.reset_peak()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        run, publisher = run_of(trainer, self), self._publisher
        run.exchange.send()
        if self._batches == 0 or (
            (publisher.every_n_steps is not None or self._batches - self._counted >= _UNCOUNTED)
            and publisher.is_due(run, trainer, self._batches + 1)
        ):
            self._counted = self._batches
            run.memory.count_next()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        run = run_of(trainer, self)
        run.exchange.receive()
        if self._publisher.is_due(run, trainer, self._batches):
            self._publish(trainer, run.memory.measure(), at_once=self._publisher.every_n_steps is not None)
        elif self._batches == 1:
            run.memory.measure()  # for the table, whatever is logged

    def _publish(self, trainer: Trainer, memory: MeasuredMemory, *, at_once: bool) -> None:
        run, step = run_of(trainer, self), self._publisher.step

        def publish(gathered: Gathered) -> None:
            logged = _logged(self._most(gathered), self._names)
            values = {f"pipeline/{key}": float(value) for key, value in logged}
            self._publisher.publish(run, trainer, values, step)

        if at_once:
            publish(run.gather_numbers(self._numbers(memory)))
        else:
            run.exchange.tell(self._numbers(memory), publish)
            self._publisher.owes = False

    def _numbers(self, memory: MeasuredMemory) -> list[float]:
        """Of this rank, filled up to as many as any rank has."""
        found = [float(number) for number in numbers_in(memory)]
        return found + [0.0] * (max(len(list(numbers_in(rank))) for rank in self._ranks) - len(found))

    def _most(self, gathered: Gathered) -> list[MeasuredMemory]:
        """By pipeline rank, of each number the largest in any replica."""
        by_rank = zip(self._ranks, *gathered, strict=True)
        return [
            with_numbers(rank, iter([max(of_replicas) for of_replicas in zip(*own, strict=True)]))
            for rank, *own in by_rank
        ]

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._publisher.owes = True

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(trainer)

    def _settle(self, trainer: Trainer) -> None:
        """Log an epoch that has not been, for callbacks that look at its end or after a validation."""
        if self._exchange is None:  # the sanity check comes before training
            return
        self._exchange.finish()
        if self._publisher.owes and not trainer.barebones:
            self._publish(trainer, run_of(trainer, self).memory.worst(), at_once=True)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._publisher.owes = False  # whatever ended the epoch
        if self._exchange is not None:
            self._exchange.drop()
            self._exchange = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = run_of(trainer, self)
        run.exchange.finish()
        gathered = run.gather_numbers(self._numbers(run.memory.worst()))
        rank_zero_info(summary(self._most(gathered), self._names))


def _logged(ranks: Sequence[MeasuredMemory], names: Sequence[str]) -> Iterator[tuple[str, float]]:
    for rank, name in zip(ranks, names, strict=True):
        for stage in rank.stages:
            yield from _logged_of_stage(stage)
        yield f"{name}/buffers_gib", rank.buffers / _GIB
        yield f"{name}/peak_memory_gib", rank.peak / _GIB
        if len(rank.stages) > 1:
            yield f"{name}/activations_gib", rank.held.num_bytes / _GIB
            yield f"{name}/activations_planned_gib", rank.planned.num_bytes / _GIB


def _logged_of_stage(stage: StageMemory) -> Iterator[tuple[str, float]]:
    name = f"stage_{stage.stage}"
    yield f"{name}/parameters", stage.num_parameters
    yield f"{name}/parameters_gib", stage.parameters / _GIB
    yield f"{name}/gradients_gib", stage.gradients / _GIB
    yield f"{name}/optimizer_state_gib", stage.optimizer_state / _GIB
    yield f"{name}/activations_gib", stage.held.num_bytes / _GIB
    yield f"{name}/activation_microbatches", stage.held.microbatches
    yield f"{name}/activations_planned_gib", stage.planned.num_bytes / _GIB


def summary(ranks: Sequence[MeasuredMemory], names: Sequence[str]) -> str:
    """The table that closes `fit`.

    Args:
        ranks: All of the pipeline.
        names: Of each, such as `stage_0`.
    """
    head = ["stage", "parameters", "size", "gradients", "optimizer"]
    head += ["activations", "planned", "micro-batches", "planned", "buffers", "peak"]
    rows = []
    for rank, name in zip(ranks, names, strict=True):
        of_rank = [size_text(rank.buffers), size_text(rank.peak)]
        for stage in rank.stages:
            alone = len(rank.stages) == 1
            rows.append([*_cells(stage), *(of_rank if alone else ["", ""])])
        if len(rank.stages) > 1:
            rows.append([name, "", "", "", "", *_activation_cells(rank.held, rank.planned), *of_rank])
    return "Memory, activations at the worst moment\n" + text_table(head, rows)


def _cells(stage: StageMemory) -> list[str]:
    sizes = (stage.parameters, stage.gradients, stage.optimizer_state)
    return [
        f"stage_{stage.stage}", f"{stage.num_parameters:,}", *map(size_text, sizes),
        *_activation_cells(stage.held, stage.planned),
    ]  # fmt: skip


def _activation_cells(held: Held, planned: Held) -> list[str]:
    return [
        size_text(held.num_bytes), size_text(planned.num_bytes), str(held.microbatches),
        str(planned.microbatches),
    ]  # fmt: skip
