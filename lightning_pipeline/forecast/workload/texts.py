"""How the planner writes numbers, and what it takes for granted."""

import csv
import os
from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

from lightning_pipeline.forecast.machine import BANDWIDTH_SHARE, DEFAULT_COPIES, EFFICIENCY, Assumptions
from lightning_pipeline.model.cut import size_text


def number_text(number: float, digits: int = 3) -> str:
    """A number in so many digits, without an exponent: large ones keep all before the point.

    Example:
        >>> number_text(3571.2), number_text(0.12345)
        ('3,571', '0.123')
    """
    return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def _with_unit(number: float, units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit of which there is one at least, once rounded."""
    if not number:
        return f"0 {units[0][1]}"
    for size, unit in units:
        if float(f"{number / size:.3g}") >= 1:
            return f"{number_text(float(f'{number / size:.3g}'))} {unit}"
    size, unit = units[-1]
    return f"{number_text(number / size)} {unit}"


def seconds_text(seconds: float) -> str:
    """A time with its unit, three digits.

    Example:
        >>> seconds_text(0.9996), seconds_text(0.04812), seconds_text(2e-5)
        ('1 s', '48.1 ms', '20 us')
    """
    return _with_unit(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def operations_text(operations: float) -> str:
    """Floating-point operations with their unit, three digits.

    Example:
        >>> operations_text(3.5712e12), operations_text(6144)
        ('3.57 TFLOP', '6.14 kFLOP')
    """
    names = ("PFLOP", "TFLOP", "GFLOP", "MFLOP", "kFLOP", "FLOP")
    return _with_unit(operations, [(1e3 ** (5 - place), name) for place, name in enumerate(names)])


def days_text(seconds: float) -> str:
    """A long time: days, or years of them.

    Example:
        >>> days_text(86400 * 12.34), days_text(86400 * 1234)
        ('12.3 days', '3.38 years')
    """
    days = seconds / 86400
    return f"{number_text(days)} days" if days < 730 else f"{number_text(days / 365.25)} years"


def basis_text(assumptions: Assumptions, measured_on: str, own_optimizer: bool = False) -> str:
    """What predictions are taken from.

    Args:
        assumptions: About the machine.
        measured_on: What the stages' times were measured on; empty where they are estimated.
        own_optimizer: Whether the module's own optimizer was looked at.
    """
    times = (
        f"Times of the stages were measured on {measured_on}."
        if measured_on
        else f"Times are estimated: {_speed_text(assumptions)}; an operation takes what its arithmetic or "
        "its memory traffic takes, whichever is longer, and a backward in halves 10 % more."
    )
    measured = ", as measured between two processes here" if assumptions.link_measured else ""
    far = ""
    if assumptions.node_size is not None and assumptions.node_link_bytes is not None:
        far = (
            f" inside a node of {assumptions.node_size} and at {assumptions.node_link_bytes / 1e9:.3g} GB/s "
            "between nodes"
        )
    memory = "not limited" if assumptions.memory is None else size_text(assumptions.memory)
    return (
        f"{times} A message takes {seconds_text(assumptions.latency)} and its bytes at "
        f"{assumptions.link_bytes / 1e9:.3g} GB/s{far}{measured}. Memory of a device is {memory}; "
        f"{_optimizer_text(assumptions, own_optimizer)}. A step is the schedule "
        "alone: data, optimizer and hooks come on top."
    )


def _speed_text(assumptions: Assumptions) -> str:
    device = assumptions.device
    if device is None or assumptions.flops is not None:
        flops = 100e12 if assumptions.flops is None else assumptions.flops
        speed = f"a device achieves {flops / 1e12:g} TFLOP/s"
    else:
        speed = f"{device.title} achieves {EFFICIENCY:.0%} of its peak"
    if device is not None and assumptions.bandwidth is None:
        return f"{speed} and {BANDWIDTH_SHARE:.0%} of its memory's {device.bandwidth / 1e9:,.0f} GB/s"
    return f"{speed} and moves {assumptions.memory_speed / 1e9:,.3g} GB/s"


def _optimizer_text(assumptions: Assumptions, own_optimizer: bool) -> str:
    if assumptions.optimizer_copies is None and own_optimizer:
        return "the optimizer keeps what the module's own keeps after a step"
    copies = assumptions.optimizer_copies
    return (
        f"the optimizer keeps {DEFAULT_COPIES if copies is None else copies:g} numbers per trained parameter"
    )


def write_csv(path: str | os.PathLike[str], kind: type[Any], rows: Sequence[Any]) -> None:
    """Write a table with a head.

    Args:
        path: Of the file.
        kind: A dataclass, whose fields are the columns.
        rows: Its instances.
    """
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(kind))
        writer.writerows(astuple(row) for row in rows)
