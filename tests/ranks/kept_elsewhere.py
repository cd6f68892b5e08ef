"""A file of a project that keeps things which steps in other files hand it."""

from typing import Any

RECORDS: list[Any] = []
CALLS = 0


def record(value: Any) -> None:
    global CALLS
    CALLS += 1
    RECORDS.append(value)
