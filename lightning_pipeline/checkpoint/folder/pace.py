"""How fast a checkpoint is written beside training."""

import math
import threading
import time
from types import TracebackType

_LEAST = 0.002  # seconds of work after which a rest is worth its switch of threads
_LONGEST = 1.0  # seconds of a rest: a disk that hangs is not training
_REST = 3.0  # times what was worked


class Pace:
    """Rests three times as long as was worked, so that training has memory, disk and interpreter to itself.

    A thread of low priority leaves training the cores, but not what they share: while four ranks on two
    cores wrote and hashed without rests, their step took up to 1.5 times as long, with rests as long as the
    work up to 1.4. Work that training slows down counts as work, so that writing gives way the more the
    busier the machine is.

    Args:
        seconds: After which there are no more rests, so that a large save does not run into its timeout.

    Example:
        >>> pace = Pace()
        >>> with pace:
        ...     total = sum(range(10))
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._hurry, self._until = threading.Event(), time.perf_counter() + seconds
        self._began = self._worked = 0.0

    def hurry(self) -> None:
        """From now on work without rests: someone waits for the end."""
        self._hurry.set()

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = time.perf_counter()
        self._worked += ended - self._began
        if self._worked >= _LEAST and ended < self._until and error is None:
            self._hurry.wait(min(_REST * self._worked, _LONGEST))
            self._worked = 0.0
