"""The table that closes `fit`: where the time of a pipeline went, and what would pay."""

import os
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import median

import torch

from lightning_pipeline.forecast import known_device, operations_text
from lightning_pipeline.measure.advice import MeasuredRun, advise
from lightning_pipeline.measure.measurement import IdealBubble, Measurement, stage_costs
from lightning_pipeline.measure.memory import peak_bytes
from lightning_pipeline.measure.meter import Meter
from lightning_pipeline.measure.pipeline_run import PipelineRun
from lightning_pipeline.measure.shares import KINDS
from lightning_pipeline.measure.steps import RankStep, gather_step
from lightning_pipeline.model.cut import size_text, stage_activations, text_table
from lightning_pipeline.schedules import Action, Plan

_COLD = "These are a fit's first steps, which are slow: they tell little"
_WORTH_SAYING = 0.02  # of the bubble


class Report:
    """What is known at the end of training; all ranks make one together.

    Args:
        run: The strategy.
        total: What was measured.
        meter: That measured it.
        names: Of the ranks' stages.
        warm: Whether the steps are like those to come; the first of a fit are not.
        ranks_here: Ranks on this machine.
    """

    def __init__(
        self,
        run: PipelineRun,
        total: Measurement,
        meter: Meter,
        names: Sequence[str],
        *,
        warm: bool,
        ranks_here: int = 1,
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        self._crowded = crowded_line(ranks_here, cores) if run.root_device.type == "cpu" else None
        self._run, self._total, self._meter, self._names, self._warm = run, total, meter, names, warm
        count = sum(parameter.numel() for parameter in run.own_parameters())
        held = run.gather_numbers([float(count), float(peak_bytes(run.root_device))])
        self._held = [(int(own[0][0]), max(peak for _, peak in own)) for own in zip(*held, strict=True)]
        self._last = gather_step(run, meter.last)
        shares = run.gather_numbers([-1.0 if meter.fixed_share is None else meter.fixed_share])
        known = [own[0] for ranks in shares for own in ranks if own[0] >= 0]
        self._fixed = sum(known) / len(known) if known else None

    def __str__(self) -> str:
        lines: list[str | None] = [headline(self._total), bubble_line(self._total)]
        lines += [expected_line(self._total), self._work(), self._crowded, self._table()]
        if not self._run.is_one_device:
            lines.append(self._advice() if self._warm else _COLD)
        return "\n".join(filter(None, lines))

    def _work(self) -> str | None:
        """Operations a second of each device, and their share of its peak where that is known."""
        run, total = self._run, self._total
        if run.is_one_device:
            return None
        trace = run.partition.trace
        work = [*(work for call in trace.calls for work in call.work), *chain(*trace.between.values())]
        flops = sum(one.flops for one in work) * total.plan.num_microbatches
        device = known_device(run.root_device)
        kinds = Counter[torch.dtype]()
        for one in work:
            kinds[one.dtype] += int(one.flops)
        peak = None if device is None else device.flops(kinds.most_common(1)[0][0])
        return work_line(3 * flops * total.steps / total.step / total.plan.num_ranks, peak)

    def _table(self) -> str:
        total = self._total
        busy = [sum(mine[kind] for kind in KINDS.values()) for mine in total.seconds]
        rows = []
        for rank, (name, (count, peak)) in enumerate(zip(self._names, self._held, strict=True)):
            forward, idle = total.seconds[rank]["forward"], total.idle[rank]
            rows.append([
                name, f"{count:,}", f"{busy[rank] / (sum(busy) or 1.0):.1%}",
                *(f"{1e3 * seconds / total.steps:.2f}" for seconds in (forward, busy[rank] - forward)),
                f"{idle / (total.makespan or 1.0):.1%}", size_text(peak),
                size_text(total.sent[rank] / total.steps),
            ])  # fmt: skip
        head = ["stage", "parameters", "time", "forward ms", "backward ms", "bubble", "peak", "sent a step"]
        return text_table(head, rows)

    def _advice(self) -> str | None:
        total, cut = self._total, self._run.partition
        forward, backward_input, backward_weight = stage_costs(total.plan, total.costs)
        rank_of = [total.plan.rank_of(stage) for stage in range(cut.num_stages)]
        held = tuple(float(stage.until_backward) for stage in stage_activations(cut, rank_of))
        return advise(
            MeasuredRun(
                total.plan, self._run.schedule, cut,
                tuple(forward), tuple(backward_input), tuple(backward_weight),
                send=hop_seconds(total.plan, self._last),
                activation_bytes=held,
                batch_size=self._meter.batch_size or None,
                schedule_share=min(1.0, total.makespan / total.step),
                fixed_share=self._fixed,
            )
        )  # fmt: skip


def headline(total: Measurement) -> str:
    """How long a step takes, how much that is a second, and what it goes to outside the schedule."""
    rates = [f"{total.samples / total.step:,.0f} samples/s"] if total.samples else []
    rates += [f"{total.tokens / total.step:,.0f} tokens/s"] if total.tokens else []
    shares = {"schedule": total.makespan / total.step}
    for name in ("data", "optimizer"):
        shares[name] = sum(mine[name] for mine in total.seconds) / len(total.seconds) / total.step
    shares["the rest"] = max(0.0, 1 - sum(shares.values()))
    step = 1e3 * total.step / total.steps
    count = "1 step" if total.steps == 1 else f"{total.steps} steps"
    return (
        f"Pipeline: {count} of {step:.2f} ms{''.join(', ' + rate for rate in rates)}\n"
        f"Of a step: {', '.join(f'{name} {share:.1%}' for name, share in shares.items())}"
    )


def bubble_line(total: Measurement) -> str:
    """What the bubble comes from."""
    free = IdealBubble.of(total.plan, total.costs)
    imbalance, rest = free.bubble - free.bubble_equal_stages, total.bubble - free.bubble
    text = (
        f"Bubble {total.bubble:.1%}: schedule {free.bubble_equal_stages:.1%}, imbalance {imbalance:+.1%}, "
        f"messages and the rest {rest:+.1%}"
    )
    return f"{text}; stage {free.slowest} is the slowest" if imbalance > _WORTH_SAYING else text


def crowded_line(ranks: int, cores: int) -> str | None:
    """What ranks wait for beside each other, where they are more than the cores that they share."""
    if ranks <= cores:
        return None
    return f"{ranks} ranks share {cores} core{'s'[: cores > 1]}: they wait for one, and messages do"


def expected_line(total: Measurement) -> str | None:
    """The schedule as measured beside what the simulator expects; nothing where there is one rank."""
    if total.plan.num_ranks == 1:
        return None
    free = IdealBubble.of(total.plan, total.costs)
    return (
        f"Schedule {1e3 * total.makespan / total.steps:.2f} ms; expected {1e3 * free.makespan:.2f} ms of "
        f"these stages with free messages, {1e3 * free.makespan_equal_stages:.2f} ms of equal ones"
    )


def work_line(flops_per_second: float, peak: float | None) -> str:
    """What a device does of the model's operations: three forwards, what is computed again left out.

    Args:
        flops_per_second: Of one device.
        peak: Of its data sheet.
    """
    mfu = "" if peak is None else f", {flops_per_second / peak:.1%} of its peak (MFU)"
    return f"Each device does {operations_text(flops_per_second)}/s{mfu}"


def hop_seconds(plan: Plan, steps: Sequence[RankStep]) -> float:
    """Median time from the end of an action to the start of the one on another rank that waited for it."""
    ended = {event.action: event.ended for step in steps for event in step.events}
    hops = []
    for step in steps:
        for event in step.events:
            source = _source(plan, event.action, ended)
            if source is not None and event.asked <= ended[source]:
                hops.append((event.started - ended[source]) / 1e9)
    return max(0.0, median(hops)) if hops else 0.0


def _source(plan: Plan, action: Action, ended: dict[Action, int]) -> Action | None:
    """The action on another rank whose message this one needs."""
    stage, kind, microbatch = action
    if kind == "W":
        return None
    other = stage - 1 if kind == "F" else stage + 1
    for name in ("F",) if kind == "F" else ("B", "I"):
        source = Action(other, name, microbatch)
        if source in ended and plan.rank_of(other) != plan.rank_of(stage):
            return source
    return None
