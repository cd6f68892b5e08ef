"""What each thread of this rank waits for, written down for who watches over it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Wait:
    """What this rank waits for.

    Args:
        what: For messages: `asking all ranks`; or what tells it.
        ranks: Global ranks that could end it.
        group: What it waits in; `None` where it looks at the notes itself.
        patience: Seconds for a rank that is alive; default `hook_timeout`.
        key: Where on the notes the cause stands that ends it.
        looks: Whether it is watched over without a group, for it ends by itself once `is_over`.
    """

    what: str | Callable[[], str]
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    patience: float | None = None
    key: str = "cause"
    looks: bool = False
    since: float = 0.0
    number: int = 0
    is_over: bool = False
    was_told: bool = False

    def text(self) -> str:
        """What is waited for."""
        return self.what if isinstance(self.what, str) else self.what()


class Waits:
    """What each thread of this rank waits for now."""

    def __init__(self) -> None:
        self._now: dict[int, Wait] = {}
        self._main = threading.get_ident()

    def enter(self, wait: Wait) -> None:
        """This thread begins to wait."""
        wait.since = time.monotonic()
        wait.number += 1
        wait.was_told = wait.is_over = False
        self._now[threading.get_ident()] = wait

    def leave(self) -> None:
        """It waits no more."""
        self._now.pop(threading.get_ident(), None)

    @contextmanager
    def inside(self, wait: Wait) -> Iterator[Wait]:
        """The block is a wait; one inside another counts as the outer one. Gives the one that counts."""
        thread = threading.get_ident()
        if thread in self._now:
            yield self._now[thread]
            return
        self.enter(wait)
        try:
            yield wait
        finally:
            self.leave()

    def of(self, lane: str) -> list[Wait]:
        """Those of the run (`run`), or of threads in the background (`saving`)."""
        now = dict(self._now)
        return [wait for thread, wait in now.items() if (thread == self._main) == (lane == "run")]
