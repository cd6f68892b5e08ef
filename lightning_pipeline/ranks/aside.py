"""Work in a thread of its own, where it may never return: a client of a stopped store waits without end."""

import threading
from collections.abc import Callable
from typing import Any

import torch


class Aside(threading.Thread):
    """Begins at once; join it for as long as it is worth waiting for.

    Args:
        work: Without arguments. On the device of who made this.

    Attributes:
        error: What the work raised, if it did.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work, self._value = work, None
        self.error: BaseException | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.start()

    def run(self) -> None:
        """What the thread does."""
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._value = self._work()
        except BaseException as error:  # raised by `result`
            self.error = error

    def result(self) -> Any:
        """What the work returned, once it has ended; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._value
