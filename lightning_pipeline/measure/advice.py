"""The one change of a running pipeline that would save most, found by simulation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.forecast import name_of, named_schedules, split_factor
from lightning_pipeline.model.cut import Partition, unit_costs
from lightning_pipeline.schedules import Auto, Costs, Plan, Schedule, Simulation, simulate

WORTH = 0.05  # share of the step that a change must save to be worth a line
_GIB = 2.0**30


@dataclass(frozen=True)
class MeasuredRun:
    """A pipeline as it was measured.

    Attributes:
        plan: What was run.
        schedule: The rule that it came from.
        partition: Where the module is cut.
        forward: Median seconds of a forward of one micro-batch, by stage.
        backward_input: The same of the input-gradient half. Where the backward is not split, half of it.
        backward_weight: The same of the weight-gradient half.
        send: Seconds of one hop between ranks.
        activation_bytes: Held for one micro-batch from its forward to its backward, by stage.
        batch_size: Samples in a batch; `None` where that is not known.
        schedule_share: Of the step's time; the rest is data, optimizer and hooks, which no change here makes
            shorter.
        fixed_share: The part of a micro-batch's time that does not fall with its size; `None`: unknown, and
            taken for nothing.
    """

    plan: Plan
    schedule: Schedule
    partition: Partition
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send: float
    activation_bytes: tuple[float, ...]
    batch_size: int | None
    schedule_share: float = 1.0
    fixed_share: float | None = None


class _Change(NamedTuple):
    """A change that can be made, with the share of the step that it would save."""

    saved: float
    text: str


def advise(situation: MeasuredRun) -> str | None:
    """The single change that would save most, when it saves more than 5 % of the step.

    Tried are: one unit over one boundary; other numbers of micro-batches that divide the batch, at most
    twice as many; and other schedules that hold the same stages in no more memory. The times of a unit are
    its share of the traced cost within the measured times of its stage; those of a micro-batch have a fixed
    part, if one was measured, and grow with its size.

    Args:
        situation: As measured.

    Returns:
        A line for the user, `None` when nothing pays.

    Example: `16 micro-batches instead of 8 would save 11 % and need no more memory with 1F1B`
    """
    best = max(_changes(situation), key=lambda change: change.saved, default=_Change(0.0, ""))
    return best.text if best.saved > WORTH else None


def _changes(situation: MeasuredRun) -> Iterator[_Change]:
    now = simulate(situation.plan, _costs(situation))
    if now.makespan > 0:
        yield from _other_schedules(situation, now)
        yield from _moves(situation, now)
        yield from _other_numbers(situation, now)


def _costs(situation: MeasuredRun, time: float = 1.0, memory: float = 1.0, backward: float = 1.0) -> Costs:
    """The measured costs, times, memory and backwards multiplied by factors."""
    return Costs(
        [time * seconds for seconds in situation.forward],
        [time * backward * seconds for seconds in situation.backward_input],
        [time * backward * seconds for seconds in situation.backward_weight],
        send=situation.send,
        activation=[memory * held for held in situation.activation_bytes],
    )


def _saved(situation: MeasuredRun, now: Simulation, then: Simulation) -> float:
    """The share of the step that goes from one schedule to the other."""
    return situation.schedule_share * (1 - then.makespan / now.makespan)


# ---- another schedule


def _other_schedules(situation: MeasuredRun, now: Simulation) -> Iterator[_Change]:
    plan = situation.plan
    stages_per_rank, rest = divmod(plan.num_stages, plan.num_ranks)
    if rest:
        return
    current = name_of(situation.schedule)
    for name, schedule in named_schedules(stages_per_rank):
        other = _planned(schedule, plan.num_ranks, plan.num_microbatches)
        if name == current or other is None:
            continue
        factor = split_factor(plan.splits_backward, other.splits_backward)
        then = simulate(other, _costs(situation, backward=factor))
        if max(then.peak_memory) <= max(now.peak_memory) + 1e-6:
            saved = _saved(situation, now, then)
            yield _Change(
                saved, f"schedule {name} instead of {current} would save {saved:.0%} in no more memory"
            )


def _planned(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Plan | None:
    try:
        return schedule.plan(num_ranks, num_microbatches)
    except ScheduleError:  # it does not serve these sizes
        return None


# ---- another number of micro-batches


def _other_numbers(situation: MeasuredRun, now: Simulation) -> Iterator[_Change]:
    before = situation.plan.num_microbatches
    for number in _numbers(situation.batch_size, before):
        size = before / number
        plan = _for_number(situation, number, size)
        if plan is None:
            continue
        fixed = situation.fixed_share or 0.0
        then = simulate(plan, _costs(situation, time=fixed + (1 - fixed) * size, memory=size))
        saved, grown = _saved(situation, now, then), (max(then.peak_memory) - max(now.peak_memory)) / _GIB
        more = (
            "no more memory"
            if abs(grown) < 0.05
            else f"{abs(grown):.1f} GiB {'more' if grown > 0 else 'less'}"
        )
        unknown = "" if situation.fixed_share is not None else ", if their time falls with their size"
        yield _Change(
            saved,
            f"{number} micro-batches instead of {before} would save {saved:.0%} and need {more} with "
            f"{name_of(situation.schedule)}{unknown}",
        )


def _numbers(batch_size: int | None, before: int) -> Iterator[int]:
    """Divisors of the batch size up to twice as many; further on, small parts no longer cost less in step."""
    if batch_size is None:
        return
    for number in range(1, min(batch_size, 2 * before) + 1):
        if batch_size % number == 0 and number != before:
            yield number


def _for_number(situation: MeasuredRun, number: int, size: float) -> Plan | None:
    """The plan for another number of micro-batches; `None` unless the stages stay on their ranks."""
    now, schedule = situation.plan, situation.schedule
    placement = [now.rank_of(stage) for stage in range(now.num_stages)]
    try:
        if isinstance(schedule, Auto):
            costs = _costs(situation, time=size, memory=size)
            return schedule.reorder(placement, number, costs) if schedule.memory is None else None
        plan = schedule.plan(now.num_ranks, number)
    except ScheduleError:  # it does not serve this number
        return None
    stays = [plan.rank_of(stage) for stage in range(plan.num_stages)] == placement
    return plan if stays else None


# ---- another cut


def _moves(situation: MeasuredRun, now: Simulation) -> Iterator[_Change]:
    units, atoms = situation.partition.trace.units, situation.partition.atoms
    for move in situation.partition.moves():
        then = simulate(situation.plan, _costs(_with_moved(situation, move.atom, move.source, move.to)))
        saved = _saved(situation, now, then)
        names = [repr(units[unit].name) for unit in atoms[move.atom].units]
        yield _Change(
            saved,
            f"moving {' and '.join(names)} from stage {move.source} to stage {move.to} would save "
            f"{saved:.0%}: partition={move.cut.first_units()}",
        )


def _with_moved(situation: MeasuredRun, atom: int, source: int, to: int) -> MeasuredRun:
    """The situation with an atom's share of each measured time taken from one stage to another."""
    partition = situation.partition
    costs = unit_costs(partition.trace)
    time = _share(costs, partition.atoms[atom].units, partition.units_of(source))
    return replace(
        situation,
        forward=_moved(situation.forward, time, source, to),
        backward_input=_moved(situation.backward_input, time, source, to),
        backward_weight=_moved(situation.backward_weight, time, source, to),
    )


def _share(amounts: Sequence[float], units: Sequence[int], among: Sequence[int]) -> float:
    total = sum(amounts[unit] for unit in among)
    return sum(amounts[unit] for unit in units) / total if total else 0.0


def _moved(values: tuple[float, ...], share: float, source: int, to: int) -> tuple[float, ...]:
    amount = share * values[source]
    return tuple(
        value + (amount if stage == to else 0.0) - (amount if stage == source else 0.0)
        for stage, value in enumerate(values)
    )
