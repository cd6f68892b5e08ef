"""The options of `lightning-pipeline plan` that cannot work are refused, before any work and all at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast import device_named, tried_schedules
from lightning_pipeline.schedules.drawing import Picture, has_plot
from lightning_pipeline.settings import Problems

_ABOVE_0 = (
    ("memory", "GiB"), ("tflops", "TFLOP/s"), ("bandwidth", "GB/s"), ("link", "GB/s"), ("node_link", "GB/s"),
    ("node", "devices"), ("tokens", "tokens"),
)  # fmt: skip
_NOT_BELOW_0 = (("latency", "microseconds"), ("optimizer_copies", "numbers per parameter"))
_OF_A_SWEEP = ("sweep_stages", "sweep_microbatches", "sweep_schedules", "csv")


def check_options(given: Namespace, typed: Sequence[str] = ()) -> None:
    """Refuse options that contradict each other, numbers that mean nothing, and files that cannot be written.

    Args:
        given: What counts.
        typed: The command line; a config may say more than is used.

    Raises:
        ConfigurationError: Naming all of them.
    """
    problems = Problems()
    problems += _numbers(given)
    problems += _not_used(given, typed)
    for name in ("sweep_stages", "sweep_microbatches"):
        problems += _counts(name, given[name])
    problems += _schedules(given.sweep_schedules)
    for name in ("svg", "png", "csv"):
        problems += _file(name, given[name])
    problems += _suffixes(given)
    problems += _device(given.device)
    problems.refuse("these options cannot work")


def _numbers(given: Namespace) -> list[str]:
    found = []
    for name, unit in _ABOVE_0:
        if given[name] is not None and not given[name] > 0:
            found.append(f"--{name} {given[name]:g} must be above 0 {unit}")
    for name, unit in _NOT_BELOW_0:
        if given[name] is not None and not given[name] >= 0:
            found.append(f"--{name} {given[name]:g} must not be below 0 {unit}")
    if given.stages is not None and given.stages < 1:
        found.append(f"--stages {given.stages} must be at least 1")
    if given.stages_per_rank < 1:
        found.append(f"--stages_per_rank {given.stages_per_rank} must be at least 1")
    if given.devices is not None and given.devices < 1:
        found.append(f"--devices {given.devices} must be at least 1")
    number = given.num_microbatches
    if number != "auto" and not (isinstance(number, int) and number >= 1):
        found.append(f"--num_microbatches {number} must be a whole number of at least 1, or auto")
    return found


def _not_used(given: Namespace, typed: Sequence[str]) -> list[str]:
    if given.devices is not None:
        others = ("sweep", "svg", "png", "stages", "schedule", "measure", *_OF_A_SWEEP[:3])
        words = {word.split("=")[0] for word in typed}
        used = [name for name in others if f"--{name}" in words]
        return [f"--{name} has no place in a search over --devices: leave one of them out" for name in used]
    if given.sweep:
        drawn = [name for name in ("svg", "png") if given[name] is not None]
        found = [f"--{name} has no picture in a --sweep: leave one of them out" for name in drawn]
        words = {word.split("=")[0] for word in typed}
        many = {"num_microbatches": "microbatches", "schedule": "schedules"}
        found += [
            f"--{name} is one, and a --sweep tries several: --sweep_{several} names them"
            for name, several in many.items()
            if f"--{name}" in words
        ]
        if given.tokens is not None:
            found.append("--tokens has no days in a --sweep: leave one of them out")
        return found
    return [f"--{name} needs --sweep" for name in _OF_A_SWEEP if given[name] is not None]


def _counts(name: str, values: Sequence[int] | None) -> list[str]:
    if values is None or (values and min(values) >= 1):
        return []
    return [f"--{name} {list(values)} must be whole numbers of at least 1"]


def _schedules(names: Sequence[str] | None) -> list[str]:
    if names is None:
        return []
    known = tried_schedules()
    unknown = [name for name in names if name.lower() not in [one.lower() for one in known]]
    if names and not unknown:
        return []
    return [f"--sweep_schedules {unknown} cannot be swept over: known are {', '.join(known)}"]


def _device(name: str | None) -> list[str]:
    try:
        if name is not None:
            device_named(name)
    except ConfigurationError as error:
        return [f"--{error}"]
    return []


def _suffixes(given: Namespace) -> list[str]:
    found = []
    for name in ("svg", "png"):
        suffix = Path(given[name]).suffix.lower() if given[name] is not None else ".svg"
        if suffix not in (".svg", ".png"):
            found.append(f"--{name} {given[name]} is neither .svg nor .png, the pictures that can be written")
        if (suffix == ".png" or (name == "png" and given.png is not None)) and not has_plot():
            found.append(f"--{name} {given[name]} needs matplotlib: pip install 'lightning-pipeline[plot]'")
    return found


def write_picture(picture: Picture, path: Path) -> None:
    """Write a picture as its suffix says.

    Args:
        picture: What to write.
        path: Of a `.svg` or `.png` file.
    """
    if path.suffix.lower() == ".png":
        path.write_bytes(picture.png())
    else:
        path.write_text(picture.svg())


def _file(name: str, path: Any) -> list[str]:
    if path is None:
        return []
    if Path(path).is_dir():
        return [f"--{name} {path} is a folder: name a file in it"]
    folder = Path(path).absolute().parent
    return [] if folder.is_dir() else [f"--{name} {path} cannot be written: there is no folder {folder}"]
