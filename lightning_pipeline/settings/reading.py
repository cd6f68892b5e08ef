"""The arguments of `PipelineStrategy`: read, checked, and refused all at once."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed

from lightning_pipeline.errors import ConfigurationError, PipelineError
from lightning_pipeline.schedules import ForwardOnly, Schedule, get_schedule
from lightning_pipeline.settings.choices import (
    DATA,
    GATHER_WEIGHTS,
    INTEGRITY,
    LOSS_WEIGHTING,
    NONFINITE,
    PARTITIONS,
    START_METHODS,
    TRANSPORTS,
)
from lightning_pipeline.settings.problems import Problems, refusal_of_early_backwards
from lightning_pipeline.settings.values import Settings


def read_settings(
    *,
    stages: object,
    num_microbatches: object = "auto",
    schedule: object = "1F1B",
    stages_per_rank: object = 1,
    partition: object = "auto",
    units: object = None,
    data_parallel_size: object = "auto",
    data: object = "auto",
    transport: object = "auto",
    process_group_backend: str | None = None,
    init_timeout: object = 300,
    step_timeout: object = 300,
    integrity: object = "sha256",
    trust_checkpoint: object = False,
    async_save: object = False,
    checkpoint_timeout: object = 1800,
    hook_timeout: object = 1800,
    resume: object = None,
    save_distributed_checkpoint: object = None,
    start_method: object = "popen",
    loss_weighting: object = "auto",
    gather_weights: object = "auto",
    on_nonfinite: object = "ignore",
    loss_over_batch: object = False,
    whole_steps: object = False,
    title: str = "PipelineStrategy cannot be set up",
) -> Settings:
    """Check every argument; `title` begins the message.

    Raises:
        ConfigurationError: Naming everything that cannot work.
    """
    problems = Problems()
    made = _schedule(schedule, _count("stages_per_rank", stages_per_rank, problems), problems)
    known_stages = _count_or_auto("stages", stages, problems)
    settings = dict(
        stages=known_stages,
        num_microbatches=_count_or_auto("num_microbatches", num_microbatches, problems),
        schedule=made,
        partition=_partition(partition, known_stages, made, problems),
        units=_units(units, problems),
        data_parallel_size=_count_or_auto("data_parallel_size", data_parallel_size, problems),
        data=_one_of("data", data, DATA, problems),
        transport=_one_of("transport", transport, TRANSPORTS, problems),
        process_group_backend=_backend(process_group_backend, problems),
        init_timeout=_duration("init_timeout", init_timeout, problems),
        step_timeout=_duration("step_timeout", step_timeout, problems),
        integrity=_one_of("integrity", integrity, INTEGRITY, problems),
        trust_checkpoint=_flag("trust_checkpoint", trust_checkpoint, problems),
        async_save=_flag("async_save", async_save, problems),
        checkpoint_timeout=_duration("checkpoint_timeout", checkpoint_timeout, problems),
        hook_timeout=_duration("hook_timeout", hook_timeout, problems),
        resume=None if resume is None else _one_of("resume", resume, ("auto",), problems),
        save_distributed_checkpoint=_flag_or_none(
            "save_distributed_checkpoint", save_distributed_checkpoint, problems
        ),
        start_method=_one_of("start_method", start_method, START_METHODS, problems),
        loss_weighting=_one_of("loss_weighting", loss_weighting, LOSS_WEIGHTING, problems),
        gather_weights=_one_of("gather_weights", gather_weights, GATHER_WEIGHTS, problems),
        on_nonfinite=_one_of("on_nonfinite", on_nonfinite, NONFINITE, problems),
        loss_over_batch=_flag("loss_over_batch", loss_over_batch, problems),
        whole_steps=_flag("whole_steps", whole_steps, problems),
    )
    if loss_over_batch is True:
        _check_over_batch(made, known_stages, settings["num_microbatches"], str(loss_weighting), problems)
    _check_whole_steps(settings, problems)
    problems.refuse(title)
    return Settings(**settings)  # type: ignore[arg-type]  # each was checked above


def _check_whole_steps(settings: Mapping[str, Any], problems: Problems) -> None:
    """Nothing goes by micro-batches where steps run whole."""
    if settings["whole_steps"] and settings["loss_over_batch"]:
        problems.append(
            "whole_steps=True runs the step on the whole batch, and so its loss is that of the batch: leave "
            "loss_over_batch out"
        )


def _count(name: str, value: object, problems: Problems) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    problems.append(f"{name}={value!r} must be a whole number of at least 1")
    return 1


def _count_or_auto(name: str, value: object, problems: Problems) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        problems.append(f"{name}={value!r} must be a whole number of at least 1, or 'auto'")
        return "auto"
    return _count(name, value, problems)


def _one_of(name: str, value: object, known: Sequence[str], problems: Problems) -> str:
    if value not in known:
        problems.append(f"{name}={value!r} is unknown: use {' or '.join(map(repr, known))}")
    return str(value)


def _flag(name: str, value: object, problems: Problems) -> bool:
    if not isinstance(value, bool):
        problems.append(f"{name}={value!r} must be True or False")
    return bool(value)


def _flag_or_none(name: str, value: object, problems: Problems) -> bool | None:
    if not isinstance(value, bool | None):
        problems.append(f"{name}={value!r} must be True, False or None")
        return None
    return value


def _check_over_batch(
    schedule: Schedule | None, stages: int | str, number: Any, loss_weighting: str, problems: Problems
) -> None:
    """A loss of the whole batch needs all forwards of the last stage before its first backward."""
    if loss_weighting != "auto":
        problems.append(
            "loss_over_batch=True computes the loss once for the batch, so there are no losses of "
            f"micro-batches that loss_weighting={loss_weighting!r} could weigh: leave it out"
        )
    if schedule is None:
        return
    ranks = stages if isinstance(stages, int) else 2
    try:
        plan = schedule.plan(ranks, number if isinstance(number, int) else 4 * ranks)
    except PipelineError:
        return  # refused where the batch is known
    if not plan.finishes_forwards:
        problems.append(refusal_of_early_backwards(schedule))


def _duration(name: str, value: object, problems: Problems) -> timedelta:
    duration = value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9:
        duration = timedelta(seconds=value)
    if isinstance(duration, timedelta) and duration > timedelta(0):
        return duration
    problems.append(f"{name}={value!r} must be seconds or a timedelta, and longer than 0")
    return timedelta(seconds=1)


def _schedule(value: object, stages_per_rank: int, problems: Problems) -> Schedule | None:
    made: object = value
    try:
        if isinstance(value, str):
            made = _schedule_by_name(value, stages_per_rank)
        elif isinstance(value, type):
            made = value()
    except (PipelineError, TypeError) as error:
        problems.append(str(error))
        return None
    if not isinstance(made, Schedule):
        problems.append(f"schedule={value!r} is no schedule: give a name, an instance or a class path")
        return None
    if isinstance(made, ForwardOnly):
        problems.append(
            f"schedule={value!r} would train nothing: it has no backwards. Validation, test and predict run "
            "forwards alone with every schedule"
        )
    if stages_per_rank not in (1, made.stages_per_rank):
        problems.append(
            f"stages_per_rank={stages_per_rank} contradicts {made!r}, which holds {made.stages_per_rank} "
            "per rank: set it in one place"
        )
    return made


def _schedule_by_name(name: str, stages_per_rank: int) -> Schedule:
    if stages_per_rank == 1:
        return get_schedule(name)
    try:
        return get_schedule(name, stages_per_rank=stages_per_rank)
    except ConfigurationError:
        made = get_schedule(name)
        if made.stages_per_rank == stages_per_rank:
            return made
        raise ConfigurationError(
            f"schedule={name!r} holds {made.stages_per_rank} stage(s) per rank and cannot hold "
            f"stages_per_rank={stages_per_rank}: choose a schedule that interleaves stages"
        ) from None


def _partition(
    value: object, stages: int | str, schedule: Schedule | None, problems: Problems
) -> str | list[str]:
    if isinstance(value, str):
        if value not in PARTITIONS:
            problems.append(
                f"partition={value!r} is unknown: use {', '.join(map(repr, PARTITIONS))}, or a list with the "
                "name of the first unit of each later stage"
            )
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        problems.append(f"partition={value!r} must be a word or a list of module names")
        return "auto"
    if isinstance(stages, int) and schedule is not None:
        expected = stages * schedule.stages_per_rank - 1
        if len(value) != expected:
            problems.append(
                f"partition names {len(value)} first unit(s) of later stages, but {expected + 1} stages "
                f"have {expected}"
            )
    return list(value)


def _units(value: object, problems: Problems) -> list[str] | None:
    if value is None:
        return None
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        problems.append(f"units={value!r} must be a list of name patterns, such as ['encoder.layers.*']")
        return None
    return list(patterns)


def _backend(value: str | None, problems: Problems) -> str | None:
    if value is not None and ":" not in value and not torch.distributed.is_backend_available(value):
        problems.append(f"process_group_backend={value!r} is not available in this build of torch")
    return value
