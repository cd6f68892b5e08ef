"""The run's store, asked with a deadline: the process that hosts it may be stopped, cut off or gone."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed.distributed_c10d import Store

_AGAIN_SECONDS = 0.05  # for an answer that did not come in time before
CAUSE = "cause"
"""Key of the first cause of a failure."""


class Notes:
    """Where ranks leave notes for each other.

    A client of a store whose host is stopped waits without end, so every question is asked in a thread of its
    own; one that hangs is never joined, and while it does no other is started.

    Args:
        store: Asked over a connection of its own, so that nobody else's questions are held up.
        patience: Longest wait for an answer, in seconds.
    """

    def __init__(self, store: Store, patience: float = 1.0) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing in the stubs
        self._patience = patience
        self._asking = threading.Lock()
        self._unanswered: threading.Thread | None = None
        self.is_gone = False
        """Whether the host has ended."""
        self.answered = time.monotonic()
        """When the host answered last."""

    def silent_for(self) -> float:
        """Seconds since the last answer, while one is awaited; else 0."""
        thread = self._unanswered
        return time.monotonic() - self.answered if thread is not None and thread.is_alive() else 0.0

    def get(self, key: str) -> str:
        """The note under a key; empty when there is none, or no answer."""
        return self._ask(lambda store: store.get(key) if store.check([key]) else "") or ""

    def get_all(self, keys: list[str]) -> dict[str, str]:
        """The notes under some keys; those that are not there are left out."""
        found: dict[str, str] = {}

        def ask(store: Store) -> str:
            known = [key for key in keys if store.check([key])]
            found.update(
                {key: value.decode() for key, value in zip(known, store.multi_get(known), strict=True)}
            )
            return ""

        self._ask(ask)
        return dict(found)

    def put(self, key: str, value: str) -> bool:
        """Leave a note; tells whether it is there. Most need not know: the wait that led here tells more."""
        return self._ask(lambda store: store.set(key, value)) is not None

    def remove(self, key: str) -> None:
        """Take a note down."""
        self._ask(lambda store: store.delete_key(key))

    def put_first(self, key: str, value: str) -> str:
        """Leave a note unless there is one; either way the one that stands. Empty without an answer."""
        return self._ask(lambda store: store.compare_set(key, "", value)) or ""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return it; 0 without an answer."""
        return int(self._ask(lambda store: store.add(key, amount)) or 0)

    def _ask(self, question: Callable[[Store], Any]) -> str | None:
        """The answer as text, `None` without one."""
        with self._asking:
            if self.is_gone:
                return None
            if self._unanswered is not None:
                self._unanswered.join(_AGAIN_SECONDS)
                if self._unanswered.is_alive():
                    return None
            answers: SimpleQueue[Any] = SimpleQueue()
            thread = threading.Thread(target=self._answer, args=(question, answers), daemon=True)
            thread.start()
            try:
                answer = answers.get(timeout=self._patience)
            except Empty:
                self._unanswered = thread
                return None
            self._unanswered = None
        return answer.decode() if isinstance(answer, bytes) else answer

    def _answer(self, question: Callable[[Store], Any], answers: "SimpleQueue[Any]") -> None:
        try:
            answer = question(self._store)
        except RuntimeError:  # the host has ended: each rank then reports what it saw itself
            self.is_gone = True
            answers.put(None)
        else:
            self.answered = time.monotonic()
            answers.put(answer if isinstance(answer, bytes) else str(answer or ""))
