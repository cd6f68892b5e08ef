"""A file of a project that keeps what steps in other files hand it, for whoever asks."""

from typing import Any

RECORDS: list[Any] = []


class Registry:
    """Of another file too."""

    size = 0


def record(value: Any) -> None:
    RECORDS.append(value)
