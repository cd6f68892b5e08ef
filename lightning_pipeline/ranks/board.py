"""Values that one rank leaves for the others of its replica: it waits for nobody, they read when they ask."""

import base64
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline._torch import tree_map
from lightning_pipeline.errors import StageFailedError
from lightning_pipeline.ranks.notes import CAUSE, Notes
from lightning_pipeline.wire import Wait, Waits

_LONGEST_NAP = 0.02  # seconds between two looks


class Board:
    """One rank posts, the others read. What nobody reads hurts nobody, so that any code may post.

    Args:
        notes: A connection of the board's own: a value may take long to arrive.
        waits: Of this rank; the lookout ends those that nobody will end.
        replica: Of this rank; each has a board of its own.
        source: Global rank that posts.
        host: Global rank that hosts the store; `None` where another process does.
        watched: Makes the context in which a wait that fails ends all ranks with its cause; gets what the
            wait is for.
    """

    def __init__(
        self,
        notes: Notes,
        waits: Waits,
        replica: int,
        source: int,
        host: int | None,
        watched: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._notes, self._waits, self._prefix = notes, waits, f"board/{replica}"
        self._source, self._host, self._watched = source, host, watched

    def post(self, key: str, make: Callable[[], Any]) -> Any:
        """Leave what `make` returns under a key, or that it failed.

        Args:
            key: Not used before.
            make: Without arguments; tensors in its result travel through the CPU.

        Returns:
            The result of `make`.

        Raises:
            StageTimeoutError: The process that hosts the store is stopped or cut off.
        """
        try:
            value = make()
        except Exception as error:
            self._put(key, ("failed", f"{type(error).__name__}: {error}"))
            raise
        self._put(key, ("result", tree_map(_on_cpu, value)))
        return value

    def remove(self, key: str) -> None:
        """Take down what all have read."""
        self._notes.remove(f"{self._prefix}/{key}")

    def read(self, key: str, what: str) -> Any:
        """Wait for a value.

        Args:
            key: As posted.
            what: That is waited for, for the message.

        Raises:
            StageFailedError: `make` failed on the rank that posts, or a rank has failed.
            StageTimeoutError: Nobody will post: the rank that should is stopped, or waits for this one.
        """
        full = f"{self._prefix}/{key}"
        with self._waiting(f"waiting for {what}", self._source) as look:
            found = self._notes.get_all([full, CAUSE])
            while full not in found and CAUSE not in found:
                look()
                found = self._notes.get_all([full, CAUSE])
            if full not in found:
                raise RuntimeError(f"{what} will not come: a rank has failed")
            kind, value = pickle.loads(base64.b64decode(found[full]))
        if kind == "failed":
            raise StageFailedError(f"the rank that works out {what} failed: {value}")
        return value

    def _put(self, key: str, value: Any) -> None:
        text = base64.b64encode(pickle.dumps(value)).decode()
        with self._waiting("leaving a value for other ranks", self._host) as look:
            while not self._notes.put(f"{self._prefix}/{key}", text):
                look()

    @contextmanager
    def _waiting(self, what: str, rank: int | None) -> Iterator[Callable[[], None]]:
        """A wait that the lookout may end; gives what to call between two looks at the notes."""
        wait = Wait(what, () if rank is None else (rank,), None, looks=True)
        nap = 0.0005
        with self._watched(what), self._waits.inside(wait) as counted:

            def look() -> None:
                nonlocal nap
                if counted.is_over:
                    raise RuntimeError(f"{what} has come to nothing")
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)

            yield look


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors of a value that was read, where they are needed."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
