"""A backend for tests on CPU that promises as little as NCCL and CUDA do; gloo moves the bytes beneath.

A send ends only when its receive runs, and the operations of one process run one after the other in the
order in which they were launched, whatever communicator they belong to (`LANES=1`), or in several such
queues (`LANES=k`), or one queue for each communicator (`LANES=0`).
"""

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

NAME = "serial"
_PATIENCE = timedelta(seconds=30)


class Launched(dist.Work):
    """An operation in a queue."""

    def __init__(self, operation: Callable[[], None]) -> None:
        super().__init__()
        self.operation = operation
        self.done, self.error = threading.Event(), None

    def wait(self, timeout: timedelta = _PATIENCE) -> bool:
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for an operation of the serial backend")
        if self.error is not None:
            raise RuntimeError(str(self.error))
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Lane:
    """Runs operations one after the other, as a stream does."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Launched] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, operation: Callable[[], None]) -> Launched:
        launched = Launched(operation)
        self._queue.put(launched)
        return launched

    def _run(self) -> None:
        while True:
            launched = self._queue.get()
            try:
                launched.operation()
            except Exception as error:  # told by `wait`
                launched.error = error
            launched.done.set()


class SerialGroup(dist.ProcessGroup):
    """Point-to-point operations in lanes."""

    memory: ClassVar[Callable[[torch.Tensor], torch.Tensor]] = staticmethod(lambda tensor: tensor)
    """What gloo can read of a tensor."""
    lanes: ClassVar[list[Lane]] = []  # of this process
    made = 0
    _name = ""

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        number = int(os.environ.get("LANES", "1"))
        if number == 0:
            self._lane = Lane()
            return
        while len(SerialGroup.lanes) < number:
            SerialGroup.lanes.append(Lane())
        self._lane = SerialGroup.lanes[SerialGroup.made % number]
        SerialGroup.made += 1

    def getBackendName(self) -> str:
        return NAME

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        tensors = [SerialGroup.memory(tensor) for tensor in tensors]

        def run() -> None:
            self._inner.send(tensors, dst, 0).wait(_PATIENCE)
            answer = torch.empty(1, dtype=torch.uint8)
            self._inner.recv([answer], dst, 1).wait(_PATIENCE)

        return self._lane.launch(run)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        tensors = [SerialGroup.memory(tensor) for tensor in tensors]

        def run() -> None:
            self._inner.recv(tensors, src, 0).wait(_PATIENCE)
            self._inner.send([torch.ones(1, dtype=torch.uint8)], src, 1).wait(_PATIENCE)

        return self._lane.launch(run)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        here = [SerialGroup.memory(tensor) for tensor in tensors]
        return self._lane.launch(lambda: _wait(self._inner.broadcast(here, options)))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        here = [SerialGroup.memory(tensor) for tensor in tensors]
        return self._lane.launch(lambda: _wait(self._inner.allreduce(here, options)))


def _wait(work: dist.Work) -> None:
    work.wait(_PATIENCE)


def register(*devices: str) -> None:
    """Make the backend known to this process.

    Args:
        devices: Their types; by default the CPU.
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(
            NAME,
            lambda store, rank, size, timeout: SerialGroup(store, rank, size, timeout),
            devices=list(devices or ["cpu"]),
        )
