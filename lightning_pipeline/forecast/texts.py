"""How the planner writes numbers, and what it takes for granted."""

from collections.abc import Sequence

from lightning_pipeline.forecast.assumptions import Assumptions
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


def basis_text(assumptions: Assumptions, measured_on: str) -> str:
    """What predictions are taken from.

    Args:
        assumptions: About the machine.
        measured_on: What the stages' times were measured on; empty where they are estimated.
    """
    times = (
        f"Times of the stages were measured on {measured_on}."
        if measured_on
        else f"Times are estimated: a device achieves {assumptions.flops / 1e12:g} TFLOP/s, moving a byte "
        "takes as long as 16 operations, a backward as two forwards, and 10 % more in halves."
    )
    measured = ", as measured between two processes here" if assumptions.link_measured else ""
    memory = "not limited" if assumptions.memory is None else size_text(assumptions.memory)
    return (
        f"{times} A message takes {seconds_text(assumptions.latency)} and its bytes at "
        f"{assumptions.link_bytes / 1e9:.3g} GB/s{measured}. Memory of a device is {memory}; the optimizer "
        f"keeps {assumptions.optimizer_copies:g} numbers per trained parameter. A step is the schedule "
        "alone: data, optimizer and hooks come on top."
    )
