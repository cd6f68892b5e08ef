"""Tensors to and from a neighbour on the same machine, by copies between the memories of two processes.

The sender packs a message into memory of its device that the receiver has opened, and records an event that
the receiver has opened too; the receiver's stream waits for that event and copies the bytes to memory of its
own. The copy engines of a device do that: no kernel spins while it waits, as a communicator's does, and a
stream only waits for events that were recorded before, so that no order of launches can deadlock. It works
between two processes of one GPU, too.

A slip of paper follows each header over the link: which piece of memory, and how to open it where it is new.
The sender fills a piece again once the receiver has said, with any later header, that its copy has ended.
"""

import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from lightning_pipeline.wire.edge import Arrival, bare_bytes, travels, wait_until
from lightning_pipeline.wire.header import read_bytes, write_bytes
from lightning_pipeline.wire.link import Link
from lightning_pipeline.wire.packing import Layout

_SLIP = struct.Struct("<QQ")
_SMALLEST = 64 * 2**10  # bytes of a piece of memory
_WASTE = 4  # a piece is used for messages of a quarter of its size or more


class Sharing(Protocol):
    """Memory and events of a device that other processes of the machine can open."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Bytes that `share` can be called with."""
        ...

    def share(self, memory: Tensor) -> bytes:
        """What `open` needs in another process. The memory must outlive its use there."""
        ...

    def open(self, handle: bytes) -> Tensor:
        """The same bytes in this process."""
        ...

    def event(self) -> Any:
        """An event that `share_event` can be called with."""
        ...

    def share_event(self, event: Any) -> bytes:
        """What `open_event` needs in another process."""
        ...

    def open_event(self, handle: bytes, device: torch.device) -> Any:
        """The same event in this process, on the device of its memory; it is only waited for."""
        ...


class CudaSharing:
    """CUDA's IPC, by what torch's multiprocessing uses for tensors in queues."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """See `Sharing`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def share(self, memory: Tensor) -> bytes:
        """See `Sharing`."""
        return pickle.dumps(reduce_tensor(memory))

    def open(self, handle: bytes) -> Tensor:
        """See `Sharing`."""
        rebuild, arguments = pickle.loads(handle)
        opened: Tensor = rebuild(*arguments)
        return opened

    def event(self) -> Any:
        """See `Sharing`."""
        return torch.cuda.Event(interprocess=True)

    def share_event(self, event: Any) -> bytes:
        """See `Sharing`."""
        return bytes(event.ipc_handle())

    def open_event(self, handle: bytes, device: torch.device) -> Any:
        """See `Sharing`."""
        return torch.cuda.Event.from_ipc_handle(device, handle)


SHARING: dict[str, Callable[[], Sharing]] = {"cuda": CudaSharing}
"""By the type of the device."""


@dataclass
class _Piece:
    """Memory that both ends know, and the event that says that it is filled.

    Attributes:
        number: By which the peer knows it.
        handles: How to open both; empty once the peer was told.
        message: The message that it was filled with last.
    """

    number: int
    memory: Tensor
    ready: Any
    handles: bytes
    message: int = 0


class _Copy:
    """A copy that was launched."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait for it."""
        self._event.wait()

    def is_completed(self) -> bool:
        """Whether it has ended."""
        ended: bool = self._event.query()
        return ended


class Copies:
    """An edge of copies between processes of one machine.

    Args:
        link: To the neighbour.
        device: Where the tensors live; on both ends of the same type.
    """

    def __init__(self, link: Link, *, device: torch.device) -> None:
        self.peer = link.peer
        self.bytes_sent = self.bytes_received = 0
        self._link: Link | None = link
        self._device = device
        self._sharing = SHARING[device.type]()
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._made = self._messages = 0
        self._free: list[_Piece] = []
        self._filled: deque[_Piece] = deque()
        self._opened: dict[int, tuple[Tensor, Any]] = {}
        self._launched: deque[tuple[_Copy, Tensor]] = deque()
        self._copied = 0

    @property
    def copied(self) -> int:
        """See `Edge`; asks the device without waiting for it."""
        self._look()
        return self._copied

    def _look(self) -> None:
        while self._launched and self._launched[0][0].is_completed():
            self._launched.popleft()
            self._copied += 1

    def peer_copied(self, count: int) -> None:
        """See `Edge`."""
        while self._filled and self._filled[0].message < count:
            self._free.append(self._filled.popleft())

    def warm_up(self) -> None:
        """Nothing is connected: memory is opened when a message needs it."""

    def can_share(self) -> str:
        """Why memory of this device cannot be shared; empty where it can."""
        try:
            self._free.append(self._new(_SMALLEST))
        except Exception as error:  # whatever driver, container or allocator have against it
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return ""

    def send(self, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        """See `Edge`."""
        if not travels(layout, tensors):
            return
        assert self._link is not None, "an aborted edge sends nothing"
        piece = self._piece(layout.num_bytes)
        for place, tensor in zip(layout.view(piece.memory), tensors, strict=True):
            if tensor is not None:
                place.copy_(tensor.detach())
        piece.ready.record(self._module.current_stream(self._device))
        piece.message, self._messages = self._messages, self._messages + 1
        self._filled.append(piece)
        self._send_bytes(self._link, _SLIP.pack(piece.number, len(piece.handles)))
        if piece.handles:
            self._send_bytes(self._link, piece.handles)
            piece.handles = b""
        self.bytes_sent += bare_bytes(layout)

    def _piece(self, num_bytes: int) -> _Piece:
        """The smallest free piece that is large enough, or a new one."""
        fitting = [
            piece
            for piece in self._free
            if num_bytes <= piece.memory.numel() <= max(_WASTE * num_bytes, _SMALLEST)
        ]
        if fitting:
            piece = min(fitting, key=lambda one: one.memory.numel())
            self._free.remove(piece)
            return piece
        return self._new(max(_SMALLEST, 1 << (num_bytes - 1).bit_length()))

    def _new(self, size: int) -> _Piece:
        with torch.inference_mode(False):  # it will be filled again under another mode
            memory = self._sharing.allocate(size, self._device)
        ready = self._sharing.event()
        handles = pickle.dumps((self._sharing.share(memory), self._sharing.share_event(ready)))
        self._made += 1
        return _Piece(self._made, memory, ready, handles)

    @staticmethod
    def _send_bytes(link: Link, data: bytes) -> None:
        buffer = torch.empty(len(data), dtype=torch.uint8)
        write_bytes(buffer, 0, data)
        link.send(buffer)

    def receive(self, layout: Layout) -> Arrival:
        """See `Edge`. The host waits for the slip, which the peer's host sends right behind the header."""
        assert self._link is not None, "an aborted edge receives nothing"
        size = bare_bytes(layout)
        if not size:
            return Arrival(None, torch.empty(0, dtype=torch.uint8, device=self._device), layout, None)
        memory, ready = self._open(self._link)
        with self._module.stream(self._stream):
            ready.wait(self._stream)
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
            buffer.copy_(memory[: layout.num_bytes], non_blocking=True)
            ended = self._module.Event()
            ended.record(self._stream)
        copy = _Copy(ended)
        self._launched.append((copy, buffer))
        self.bytes_received += size
        return Arrival(copy, buffer, layout, None)

    def _open(self, link: Link) -> tuple[Tensor, Any]:
        number, length = _SLIP.unpack(self._take_bytes(link, _SLIP.size))
        if length:
            memory_handle, event_handle = pickle.loads(self._take_bytes(link, length))
            with torch.inference_mode(False):
                memory = self._sharing.open(memory_handle)
            self._opened[number] = memory, self._sharing.open_event(event_handle, memory.device)
        return self._opened[number]

    @staticmethod
    def _take_bytes(link: Link, count: int) -> bytes:
        link.post(count)
        return read_bytes(link.take(), 0, count)

    def settle(self) -> None:
        """See `Edge`. What was sent waits for the peer's device, and so for its host: not here."""

        def is_over() -> bool:
            return not self._launched and (not self._filled or self._filled[-1].ready.query())

        self._look()
        if self._link is not None:
            wait_until(is_over, self._look, self._link)

    def abort(self) -> None:
        """See `Edge`."""
        self._launched.clear()
        self._filled.clear()
        self._free.clear()
        self._opened.clear()
        self._link = None
