"""A backend for tests on CPU that promises as little as NCCL and CUDA do; gloo moves the bytes beneath.

A send ends only when its receive runs, and the operations of one process run one after the other in the
order in which they were launched, whatever communicator they belong to; see `tests/streams.py`. On a device
that works late `wait` lets its current stream wait, not the host.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests import streams

NAME = "serial"
_PATIENCE = timedelta(seconds=60)
_AT_ONCE = timedelta(milliseconds=1)


class Launched(dist.Work):
    """An operation in a queue.

    Args:
        operation: What is done.
        stream: The stream that `wait` lets wait. Default: the host waits.
    """

    def __init__(self, operation: Callable[[], None], stream: Callable[[], streams.Stream] | None) -> None:
        super().__init__()
        self.operation, self.stream = operation, stream
        self.done, self.error = threading.Event(), None

    def run(self) -> None:
        """Do it."""
        try:
            self.operation()
        except Exception as error:  # told by `wait`
            self.error = error
            streams.Queue.errors.append(f"{type(error).__name__}: {error}")
        self.done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.stream is not None and timeout is None:
            self.stream().queue.put(self._until_done)
            return True
        if self.stream is not None:
            streams.Event.host_waits += 1
        self._until_done(timeout or _PATIENCE)
        return True

    def _until_done(self, timeout: timedelta = _PATIENCE) -> None:
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for an operation of the serial backend")
        if self.error is not None:
            raise RuntimeError(str(self.error))

    def is_completed(self) -> bool:
        return self.done.is_set()


class SerialGroup(dist.ProcessGroup):
    """Point-to-point operations in lanes."""

    memory: ClassVar[Callable[[torch.Tensor], torch.Tensor]] = staticmethod(lambda tensor: tensor)
    """What gloo can read of a tensor."""
    works_late: ClassVar[Callable[[torch.Tensor], bool]] = staticmethod(lambda tensor: False)
    """Whether the device of a tensor works later than the host asks."""
    serves: ClassVar[tuple[str, ...]] = ()
    """Types of devices whose tensors it takes; empty: all."""
    _name = ""

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = streams.Stream()
        self._aborted = False

    def abort(self) -> None:
        """What is under way ends with an error, as with NCCL; what is launched later, too."""
        self._aborted = True
        with contextlib.suppress(RuntimeError):  # a receive that times out closes the connections
            self._inner.recv(
                [torch.empty(1, dtype=torch.uint8)], (self.rank() + 1) % self.size(), 0x1EAF
            ).wait(_AT_ONCE)

    def _wait(self, work: dist.Work) -> None:
        if self._aborted:
            raise RuntimeError("the serial backend was aborted")
        work.wait(_PATIENCE)

    def getBackendName(self) -> str:
        return NAME

    def _launch(
        self, tensors: list[torch.Tensor], operation: Callable[[list[torch.Tensor]], None]
    ) -> dist.Work:
        """Behind what the current stream was given, as NCCL does, and refusing what is not on its device."""
        for tensor in tensors:
            if SerialGroup.serves and tensor.device.type not in SerialGroup.serves:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        late = bool(tensors) and SerialGroup.works_late(tensors[0])
        here = [SerialGroup.memory(tensor) for tensor in tensors]
        if late:
            self._stream.wait_stream(streams.current())
            for tensor in tensors:
                tensor.record_stream(self._stream)
        launched = Launched(lambda: operation(here), streams.current if late else None)
        self._stream.queue.put(launched.run)
        return launched

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        def run(here: list[torch.Tensor]) -> None:
            self._wait(self._inner.send(here, dst, 0))
            answer = torch.empty(1, dtype=torch.uint8)
            self._wait(self._inner.recv([answer], dst, 1))

        return self._launch(tensors, run)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        def run(here: list[torch.Tensor]) -> None:
            self._wait(self._inner.recv(here, src, 0))
            self._wait(self._inner.send([torch.ones(1, dtype=torch.uint8)], src, 1))

        return self._launch(tensors, run)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._launch([], lambda here: self._wait(self._inner.barrier()))

    def allgather(self, outputs: list[Any], inputs: list[torch.Tensor], options: Any = None) -> dist.Work:
        def run(here: list[torch.Tensor]) -> None:
            found = [[SerialGroup.memory(tensor) for tensor in row] for row in outputs]
            self._wait(self._inner.allgather(found, here))

        return self._launch(inputs, run)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        return self._launch(tensors, lambda here: self._wait(self._inner.broadcast(here, options)))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        return self._launch(tensors, lambda here: self._wait(self._inner.allreduce(here, options)))


def register(*devices: str) -> None:
    """Make the backend known to this process.

    Args:
        devices: Their types; by default the CPU.
    """
    SerialGroup.serves = devices
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(
            NAME,
            lambda store, rank, size, timeout: SerialGroup(store, rank, size, timeout),
            devices=list(devices or ["cpu"]),
        )
