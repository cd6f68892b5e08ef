"""Memory and events of the island that several processes open, as CUDA's IPC has them."""

import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.wire import copies
from tests import island, streams

_PATIENCE = 60.0


def _file(path: str, count: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=count, dtype=dtype)


class SharedEvent:
    """An event that another process may wait for: how often it was recorded, and reached, in a file."""

    def __init__(self, path: str) -> None:
        self.path, self._counts = path, _file(path, 2, torch.int64)

    def record(self, stream: streams.Stream | None = None) -> None:
        """Put it behind what the stream was given; who waits later waits for that."""
        number = int(self._counts[0]) + 1
        self._counts[0] = number
        (stream or streams.current()).queue.put(lambda: self._counts[1].fill_(number))

    def wait(self, stream: streams.Stream | None = None) -> None:
        """What the stream is given from now on waits for what was recorded last."""
        number = int(self._counts[0])
        (stream or streams.current()).queue.put(lambda: self._until(number))

    def _until(self, number: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        while int(self._counts[1]) < number:
            if time.monotonic() > deadline:
                raise TimeoutError("an event of another process was not reached")
            time.sleep(0.0005)

    def query(self) -> bool:
        """Whether it was reached."""
        return bool(self._counts[1] >= self._counts[0])


class IslandSharing:
    """Files in memory; they are gone with the process that made them."""

    refused = ""
    """Why `open` fails, where it is to fail."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self._paths: dict[int, str] = {}
        weakref.finalize(self, self._folder.cleanup)

    def _new(self) -> str:
        return str(Path(self._folder.name) / str(time.monotonic_ns()))

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        path = self._new()
        memory = island.made(_file(path, num_bytes, torch.uint8))
        self._paths[memory.untyped_storage()._cdata] = path
        return memory

    def share(self, memory: Tensor) -> bytes:
        return f"{self._paths[memory.untyped_storage()._cdata]}:{memory.numel()}".encode()

    def open(self, handle: bytes) -> Tensor:
        if IslandSharing.refused:
            raise RuntimeError(IslandSharing.refused)
        path, size = handle.decode().rsplit(":", 1)
        return island.made(_file(path, int(size), torch.uint8))

    def event(self) -> SharedEvent:
        return SharedEvent(self._new())

    def share_event(self, event: SharedEvent) -> bytes:
        return event.path.encode()

    def open_event(self, handle: bytes, device: torch.device) -> Any:
        return SharedEvent(handle.decode())


def register() -> None:
    """Let edges of the island copy."""
    copies.SHARING[island.NAME] = IslandSharing
