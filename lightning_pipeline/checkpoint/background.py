"""Writes a checkpoint while training goes on: at most one at a time, and no failure is lost."""

import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeline.checkpoint.folder import Pace


def _step_back() -> None:
    """Let training have the cores: on Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Background:
    """One piece of work in a thread of its own.

    Args:
        rests_for: Seconds from the start of a piece of work in which it may rest.
    """

    def __init__(self, rests_for: float = math.inf) -> None:
        self._rests_for = rests_for
        self._thread: threading.Thread | None = None
        self._pace = Pace()
        self._error: BaseException | None = None
        self._after: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._busy = False

    def start(self, work: Callable[[Pace], None]) -> None:
        """Do it; waits for what is in flight.

        Args:
            work: Enters what it is given around each piece of what it does.

        Raises:
            BaseException: What the work before raised.
        """
        self.wait()
        self._busy, self._pace = True, Pace(self._rests_for)
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Pace], None]) -> None:
        _step_back()
        try:
            work(self._pace)
        except BaseException as error:  # raised by `check` in the main thread
            self._failed(error)
        while True:
            with self._lock:
                if not self._after or self._error is not None:
                    self._after.clear()
                    self._busy = False
                    return
                action = self._after.pop(0)
            try:
                action()
            except BaseException as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            self._error = error

    def later(self, action: Callable[[], None]) -> None:
        """Run an action once the work in flight went well; at once when there is none.

        When the work failed it is dropped, also before anybody was told: the checkpoint that it would remove
        may be the last good one.
        """
        with self._lock:
            if self._error is not None:
                return
            if self._busy:
                self._after.append(action)
                return
        action()

    def check(self) -> None:
        """Raise what went wrong, if anything did; does not wait.

        Raises:
            BaseException: What the work raised.
        """
        with self._lock:
            if self._error is None or self._busy:
                return
            error, self._error = self._error, None
        raise error

    def wait(self) -> None:
        """Wait for what is in flight.

        Raises:
            BaseException: What it raised.
        """
        if self._thread is not None:
            self._pace.hurry()
            self._thread.join()
            self._thread = None
        self.check()

    def abandon(self, seconds: float) -> None:
        """After a failure of the run: give it some time, and say what became of it."""
        if self._thread is not None:
            self._pace.hurry()
            self._thread.join(seconds)
            if self._thread.is_alive():
                rank_zero_warn("the checkpoint in flight was not finished; the one before it stands")
            self._thread = None
        if self._error is not None:
            rank_zero_warn(f"the checkpoint in flight was not written: {self._error}")
            self._error = None
