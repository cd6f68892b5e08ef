"""Schedules by name: ours, torch's spellings, and class paths."""

import importlib
from collections.abc import Callable
from typing import cast

from lightning_pipeline.errors import ConfigurationError, ScheduleError
from lightning_pipeline.schedules.plans import Schedule
from lightning_pipeline.schedules.rules import (
    ZBH1,
    ZBH2,
    ZBV,
    DualPipeV,
    ForwardOnly,
    FromTable,
    FromTorch,
    GPipe,
    Interleaved1F1B,
    InterleavedZeroBubble,
    LoopedBFS,
    OneFOneB,
    VHalf,
    VMin,
)
from lightning_pipeline.schedules.search import Auto

_SCHEDULES: dict[str, type[Schedule]] = {
    "1F1B": OneFOneB,
    "Auto": Auto,
    "DualPipeV": DualPipeV,
    "ForwardOnly": ForwardOnly,
    "FromTable": FromTable,
    "FromTorch": FromTorch,
    "GPipe": GPipe,
    "Interleaved1F1B": Interleaved1F1B,
    "InterleavedZeroBubble": InterleavedZeroBubble,
    "LoopedBFS": LoopedBFS,
    "VHalf": VHalf,
    "VMin": VMin,
    "ZBH1": ZBH1,
    "ZBH2": ZBH2,
    "ZBV": ZBV,
}
_ALIASES = {
    "OneFOneB": "1F1B",
    "V-Half": "VHalf",
    "V-Min": "VMin",
    "ZB-H1": "ZBH1",
    "ZB-H2": "ZBH2",
    "ZB-V": "ZBV",
    "ZBVZeroBubble": "ZBV",
    "Schedule1F1B": "1F1B",
    "ScheduleDualPipeV": "DualPipeV",
    "ScheduleGPipe": "GPipe",
    "ScheduleInterleaved1F1B": "Interleaved1F1B",
    "ScheduleInterleavedZeroBubble": "InterleavedZeroBubble",
    "ScheduleLoopedBFS": "LoopedBFS",
    "ScheduleZBVZeroBubble": "ZBV",
}


def available_schedules() -> tuple[str, ...]:
    """The names that `get_schedule` knows, sorted. Aliases, such as torch's spellings, are not listed."""
    return tuple(sorted(_SCHEDULES, key=str.lower))


def get_schedule(name: str, **options: object) -> Schedule:
    """Make a schedule from its name.

    Args:
        name: One of `available_schedules()`, torch's name for one, or a class path such as
            `my_package.schedules.Mine`. Case does not matter in names.
        options: What the class takes, such as `stages_per_rank`.

    Raises:
        ScheduleError: No schedule has this name, or the class path leads to none.
        ConfigurationError: The schedule does not take these options.

    Example:
        >>> get_schedule("1f1b")
        1F1B
    """
    schedule = _find(name)
    try:
        return cast(Callable[..., Schedule], schedule)(**options)
    except TypeError as error:
        raise ConfigurationError(f"schedule {name!r} cannot be made with {options}: {error}") from error


def _find(name: str) -> type[Schedule]:
    known = {key.lower(): schedule for key, schedule in _SCHEDULES.items()}
    known.update({alias.lower(): _SCHEDULES[key] for alias, key in _ALIASES.items()})
    found = known.get(name.strip().lower())
    if found is not None:
        return found
    if "." in name:
        return _import(name)
    raise ScheduleError(
        f"there is no schedule {name!r}: known are {', '.join(available_schedules())}; "
        f"a schedule of your own goes by its class path, such as 'my_package.schedules.Mine'"
    )


def _import(path: str) -> type[Schedule]:
    module_name, _, class_name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ScheduleError(
            f"schedule {path!r} cannot be imported ({error}): known are {', '.join(available_schedules())}"
        ) from error
    if not callable(getattr(found, "plan", None)):
        raise ScheduleError(f"{path} is not a schedule: it has no method plan(num_ranks, num_microbatches)")
    return cast(type[Schedule], found)
