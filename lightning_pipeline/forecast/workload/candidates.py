"""The schedules that a planner tries by name."""

from collections.abc import Iterator

from lightning_pipeline.errors import ConfigurationError, ScheduleError
from lightning_pipeline.forecast.machine import SPLIT_SURPLUS
from lightning_pipeline.schedules import (
    Auto,
    ForwardOnly,
    FromTable,
    FromTorch,
    Schedule,
    available_schedules,
    get_schedule,
)

_NOT_TRIED = (
    Auto,
    ForwardOnly,
    FromTable,
    FromTorch,
)  # a search, no training, and a file, another's class


def named_schedules(stages_per_rank: int) -> Iterator[tuple[str, Schedule]]:
    """The registered rules that hold so many stages on each rank, by name.

    Args:
        stages_per_rank: At least 1.

    Example:
        >>> [name for name, _ in named_schedules(1)]
        ['1F1B', 'GPipe', 'ZBH1', 'ZBH2']
    """
    for name in available_schedules():
        schedule = _made(name, stages_per_rank)
        if schedule is not None and schedule.stages_per_rank == stages_per_rank:
            yield name, schedule


def tried_schedules() -> list[str]:
    """Names of all that are tried, `Auto` included."""
    classes = (ForwardOnly, FromTable, FromTorch)
    return [name for name in available_schedules() if name not in {one.__name__ for one in classes}]


def _made(name: str, stages_per_rank: int) -> Schedule | None:
    with_option: dict[str, object] = {"stages_per_rank": stages_per_rank}
    for options in (with_option, {}) if stages_per_rank > 1 else ({},):
        try:
            schedule = get_schedule(name, **options)
        except (ConfigurationError, ScheduleError):  # it does not take this option, or needs others
            continue
        return None if isinstance(schedule, _NOT_TRIED) else schedule
    return None


def name_of(schedule: Schedule) -> str:
    """What a user writes to get this kind of schedule: a registered name, else its class."""
    for name in available_schedules():
        try:
            if type(get_schedule(name)) is type(schedule):
                return name
        except (ConfigurationError, ScheduleError):  # those that need options
            continue
    return type(schedule).__name__


def strategy_text(stages: int, num_microbatches: int, name: str, stages_per_rank: int) -> str:
    """What to write into a script for a schedule that is registered.

    Args:
        stages: Ranks of the pipeline.
        num_microbatches: Of a replica's batch.
        name: Of the schedule.
        stages_per_rank: Stages on each rank.

    Example:
        >>> strategy_text(4, 8, "Interleaved1F1B", 2)
        'PipelineStrategy(stages=4, num_microbatches=8, schedule="Interleaved1F1B")'
    """
    options = f'stages={stages}, num_microbatches={num_microbatches}, schedule="{name}"'
    if get_schedule(name).stages_per_rank != stages_per_rank:
        options += f", stages_per_rank={stages_per_rank}"
    return f"PipelineStrategy({options})"


def split_factor(measured_split: bool, plan_splits: bool) -> float:
    """What to multiply measured backward times by for a plan that splits backwards, or does not.

    Args:
        measured_split: Whether the times were measured in halves.
        plan_splits: Whether the plan runs halves.
    """
    if measured_split == plan_splits:
        return 1.0
    return SPLIT_SURPLUS if plan_splits else 1 / SPLIT_SURPLUS
