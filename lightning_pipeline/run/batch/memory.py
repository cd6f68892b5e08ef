"""The memory of a rank that holds stages: measured against its plan, and what to change when it runs out."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.errors import PipelineError, ScheduleError
from lightning_pipeline.executor import Executor
from lightning_pipeline.measure import HeldStages, MeasuredMemory, MemoryMeter, PipelineRun
from lightning_pipeline.model.cut import (
    Partition,
    StageActivations,
    peak_activations,
    size_text,
    stage_activations,
    text_table,
)
from lightning_pipeline.model.tensors import Held
from lightning_pipeline.ranks import Failure, Where
from lightning_pipeline.schedules import Auto, Plan, get_schedule

_WORTH_IT = 0.9  # what an advice must leave of what is held now
# From what costs the least time to what holds the least.
_SPARING = ("1F1B", "Interleaved1F1B", "VHalf", "VMin")


class StagesMeter(MemoryMeter):
    """Measures one rank of a pipeline.

    Args:
        split: Its stages.
        cut: Where they were cut.
        executor: Runs them.
        waiting: Gives, of a stage, the micro-batches that wait for a backward, and for a W.
        plan: Gives the plan of the last step, None before the first.
        optimizers: Gives those of the run.
        aside: Gives parameters with gradients of theirs that are not in `.grad`.
        device: Of the rank.
    """

    def __init__(
        self,
        split: HeldStages,
        cut: Partition,
        executor: Executor,
        waiting: Callable[[int], tuple[int, int]],
        plan: Callable[[], Plan | None],
        optimizers: Callable[[], Iterable[Optimizer]],
        aside: Callable[[], Iterable[tuple[Tensor, Tensor]]],
        device: torch.device,
    ) -> None:
        super().__init__(split, executor.stages, optimizers, device)
        self.split, self.plan, self._gradients_aside = split, plan, aside
        self._cut, self._executor, self._waiting = cut, executor, waiting
        self._foreseen: list[StageActivations] = []
        self._peaks: tuple[Plan | None, dict[int, Held], Held] = (None, {}, Held())

    @override
    def _held_now(self) -> dict[int, Held]:
        counted = self.split.counted_now()
        if counted is not None:
            return counted
        held = {}
        for stage in self._indices:
            (saved, waiting), foreseen = self._waiting(stage), self.foreseen()[stage]
            size = saved * foreseen.until_backward + waiting * foreseen.until_weight
            held[stage] = Held(size, saved + waiting)
        return held

    @override
    def foreseen(self) -> list[StageActivations]:
        plan = self.plan()
        if not self._foreseen and plan is not None:
            ranks = [plan.rank_of(stage) for stage in range(plan.num_stages)]
            self._foreseen = stage_activations(self._cut, ranks)
        return self._foreseen or stage_activations(self._cut)

    @override
    def _planned(self) -> tuple[dict[int, Held], Held]:
        plan = self.plan()
        if plan is not None and plan is not self._peaks[0]:
            stages, ranks = peak_activations(plan, self.foreseen())
            self._peaks = plan, stages, ranks[self._executor.rank]
        return self._peaks[1:]

    @override
    def _aside(self) -> Iterable[tuple[Tensor, Tensor]]:
        return self._gradients_aside()

    @override
    def _buffer_bytes(self) -> int:
        return self._executor.buffer_bytes


def watch_memory(meter: StagesMeter, run: PipelineRun, failure: Failure) -> None:
    """From now on explain errors for want of memory to all ranks.

    Args:
        meter: Of this rank.
        run: What is known of it.
        failure: Tells the others.
    """

    def explain(error: BaseException, where: Where) -> str:
        if not is_out_of_memory(error):
            return ""
        return explanation(meter, where, run)

    failure.explain = explain


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that memory is out, on a device or on the host."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    known = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return any(part in text for part in known) or is_out_of_memory(error.__cause__)


def explanation(meter: StagesMeter, where: Where, run: PipelineRun) -> str:
    """The memory table of a rank, and what to change.

    Args:
        meter: Of the rank.
        where: What it was doing.
        run: What is known of it.
    """
    memory = meter.now()
    stages = " and ".join(str(stage.stage) for stage in memory.stages)
    device = ", ".join(f"{name} {size_text(size)}" for name, size in meter.device_sizes().items())
    advice = "".join(f"\n  - {line}" for line in Advice(meter, memory, where, run).lines())
    return (
        f"\nOut of memory on rank {run.pipeline_rank} (stage {stages}, {meter.device}) in {where}. It held:"
        f"\n{_table(memory)}\nmessage buffers {size_text(memory.buffers)}, {device}"
        f"\nWhat to change:{advice}\n"
    )


def _table(memory: MeasuredMemory) -> str:
    head = ["stage", "parameters", "gradients", "optimizer", "activations", "micro-batches", "at the peak"]
    rows = [
        [
            str(stage.stage), *map(size_text, (stage.parameters, stage.gradients, stage.optimizer_state)),
            size_text(stage.held.num_bytes), str(stage.held.microbatches),
            f"{size_text(stage.planned.num_bytes)} of {stage.planned.microbatches}",
        ]
        for stage in memory.stages
    ]  # fmt: skip
    return text_table(head, rows)


class Advice:
    """What would let a rank hold less, worked out from the plan; nothing that would not help here.

    Args:
        meter: Of the rank.
        memory: What it held.
        where: What it was doing.
        run: What is known of it.
    """

    def __init__(self, meter: StagesMeter, memory: MeasuredMemory, where: Where, run: PipelineRun) -> None:
        self._meter, self._memory, self._schedule = meter, memory, run.schedule
        self._cut, self._rank, self._batch_size = run.partition, run.pipeline_rank, run.batch_size
        self._stage = memory.stages[0].stage if where.stage is None else where.stage

    def lines(self) -> Iterator[str]:
        """One line for each change that pays."""
        plan = self._meter.plan()
        if plan is not None and self._memory.planned.num_bytes:
            yield from self._other_schedule(plan)
            yield from self._more_microbatches(plan)
            yield from self._recompute(plan)
        if plan is not None:
            yield from self._other_cut(plan)
        if self._meter.device.type == "cuda":
            yield from self._fragments()
        yield "more stages: each holds less of the model, its gradients and its optimizer state"

    def _instead(self, held: int) -> str:
        now = self._memory.planned.num_bytes
        return (
            f"this rank would hold {size_text(held)} of activations at the peak instead of {size_text(now)}"
        )

    def _pays(self, held: int) -> bool:
        return held < _WORTH_IT * self._memory.planned.num_bytes

    def _peak(self, plan: Plan, activations: list[StageActivations]) -> int:
        return peak_activations(plan, activations)[1][self._rank].num_bytes

    def _other_schedule(self, plan: Plan) -> Iterator[str]:
        for name in _SPARING:
            other = _plan_of(name, plan)
            if other is not None and _placement(other) == _placement(plan):
                held = self._peak(other, self._meter.foreseen())
                if self._pays(held):
                    yield f"schedule={name!r}: {self._instead(held)}"
                    return

    def _more_microbatches(self, plan: Plan) -> Iterator[str]:
        number, batch_size = 2 * plan.num_microbatches, self._batch_size
        if batch_size is None or batch_size < number or isinstance(self._schedule, Auto):
            return  # `Auto` would search for long
        halves = [
            StageActivations(one.until_backward // 2, one.until_weight // 2) for one in self._meter.foreseen()
        ]
        try:
            held = self._peak(self._schedule.plan(plan.num_ranks, number), halves)
        except ScheduleError:  # it does not serve this number
            return
        if self._pays(held):
            yield f"num_microbatches={number}: {self._instead(held)}"

    def _recompute(self, plan: Plan) -> Iterator[str]:
        kept = [_inputs_of_units(self._cut, stage) for stage in range(plan.num_stages)]
        held = self._peak(plan, [StageActivations(size, size) for size in kept])
        if not self._cut.trace.checkpointed and self._pays(held):
            yield f"recompute: with torch.utils.checkpoint around the units {self._instead(held)}"

    def _other_cut(self, plan: Plan) -> Iterator[str]:
        """Move the boundary before or after the stage by one atom, if that lowers the worse of both."""
        best = None
        now = self._needed(self._cut, plan)[self._stage]
        for move in self._cut.moves():
            if move.source != self._stage:
                continue
            after = self._needed(move.cut, plan)
            worst = max(after[self._stage], after[move.to])
            if worst < 0.95 * now and (best is None or worst < best[0]):
                best = worst, move.cut
        if best is not None:
            worst, moved = best
            yield (
                f"partition={moved.first_units()}: the larger of the two stages would need "
                f"{size_text(worst)} for parameters and activations instead of {size_text(now)}"
            )

    def _needed(self, cut: Partition, plan: Plan) -> list[float]:
        """Bytes of each stage: activations at its peak, and states in proportion to its parameters."""
        own = self._memory.stages
        per_parameter = sum(s.states for s in own) / max(1, sum(s.num_parameters for s in own))
        peaks, _ = peak_activations(plan, stage_activations(cut, _placement(plan)))
        return [
            peaks[stage].num_bytes + per_parameter * cut.num_parameters[stage]
            for stage in range(cut.num_stages)
        ]

    def _fragments(self) -> Iterator[str]:
        sizes = self._meter.device_sizes()
        unused = sizes["reserved"] - sizes["allocated"]
        if unused > 0.1 * sizes["total of the device"]:
            yield (
                f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: {size_text(unused)} are "
                "reserved, but in pieces too small to use"
            )


def _placement(plan: Plan) -> list[int]:
    return [plan.rank_of(stage) for stage in range(plan.num_stages)]


def _plan_of(name: str, like: Plan) -> Plan | None:
    per_rank = like.num_stages // like.num_ranks
    try:
        rule = get_schedule(name)
        if rule.stages_per_rank != per_rank:
            rule = get_schedule(name, stages_per_rank=per_rank)
        found = rule.plan(like.num_ranks, like.num_microbatches)
    except PipelineError:  # it does not serve this number of stages or micro-batches
        return None
    return found if found.num_stages == like.num_stages else None


def _inputs_of_units(cut: Partition, stage: int) -> int:
    """Bytes of what units of a stage are given by others: with recomputing, all that they keep."""
    units = set(cut.units_of(stage))
    calls = [call for call in cut.trace.calls if call.unit in units]
    values = {(tag.call, tag.leaf) for call in calls for tag in call.reads if tag.kind == "value"}
    return sum(cut.trace.calls[index].specs[leaf].num_bytes for index, leaf in values)
