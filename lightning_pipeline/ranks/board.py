"""Values that one rank leaves for the others of its replica: it waits for nobody, they read when they ask."""

import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store
from torch.utils._pytree import tree_map

from lightning_pipeline.errors import StageFailedError
from lightning_pipeline.ranks.notes import CAUSE

_LONGEST_NAP = 0.02  # seconds between two looks


class Board:
    """One rank posts, the others read. What nobody reads hurts nobody, so that any code may post.

    Args:
        store: Of this run.
        replica: Of this rank; each has a board of its own.
        timeout: Longest wait for a value.
        watched: Makes the context in which a wait that fails ends all ranks with its cause; gets what the
            wait is for.
    """

    def __init__(
        self,
        store: Store,
        replica: int,
        timeout: timedelta,
        watched: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._store, self._prefix, self._watched = store, f"board/{replica}", watched
        self._seconds = timeout.total_seconds()

    def post(self, key: str, make: Callable[[], Any]) -> Any:
        """Leave what `make` returns under a key, or that it failed.

        Args:
            key: Not used before.
            make: Without arguments; tensors in its result travel through the CPU.

        Returns:
            The result of `make`.
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
        self._store.delete_key(f"{self._prefix}/{key}")

    def read(self, key: str, what: str) -> Any:
        """Wait for a value.

        Args:
            key: As posted.
            what: That is waited for, for the message.

        Raises:
            StageFailedError: `make` failed on the rank that posts.
            StageTimeoutError: Nothing was posted in time.
        """
        with self._watched(f"waiting for {what}"):
            kind, value = self._wait(f"{self._prefix}/{key}", what)
        if kind == "failed":
            raise StageFailedError(f"the rank that works out {what} failed: {value}")
        return value

    def _put(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}", pickle.dumps(value))  # type: ignore[arg-type]  # bytes will do

    def _wait(self, key: str, what: str) -> Any:
        deadline, nap = time.monotonic() + self._seconds, 0.0005
        while not self._store.check([key]):
            if self._store.check([CAUSE]) or time.monotonic() > deadline:
                raise RuntimeError(
                    f"Timed out waiting {self._seconds:g} s for {what}: the rank that works it out has not "
                    "been asked. Code for one rank alone (rank_zero_only, is_global_zero) must not ask for it"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return pickle.loads(self._store.get(key))


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors of a value that was read, where they are needed."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
