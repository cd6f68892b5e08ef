"""What is asked for many times while a batch begins, and is found once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Findings:
    """What some functions find: anew each time, but once while it is held.

    A batch begins with several runs of the step, each of which leaves everything as it was: what a step may
    change is the same for all of them.
    """

    def __init__(self) -> None:
        self._found: dict[Callable[[], Any], Any] | None = None

    def of(self, find: Callable[[], T]) -> Callable[[], T]:
        """The same function, which is not called again while what it found is held."""

        def found() -> T:
            if self._found is None:
                return find()
            if find not in self._found:
                self._found[find] = find()
            known: T = self._found[find]
            return known

        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, each of the functions is called once."""
        before, self._found = self._found, {}
        try:
            yield
        finally:
            self._found = before

    def forget(self) -> None:
        """Something has changed: what is held is found anew."""
        if self._found is not None:
            self._found.clear()
