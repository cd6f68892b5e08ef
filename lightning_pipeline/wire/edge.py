"""Tensors to and from one neighbouring rank, from device to device.

A link tells the peer's host what comes (the header); an edge moves the tensors behind it: by a communicator
of the device for each direction, here, or by copies between processes (`copies`). Operations of an edge are
launched in the order of `schedules.communicate`, which is free of deadlock even where a device
runs everything that a rank has launched one after the other, and a send ends only when its receive runs:
NCCL and CUDA promise no more than that.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.wire.link import Link, LinkError
from lightning_pipeline.wire.packing import Layout, TensorSpec

_PAUSE = 0.0005  # seconds between looks at operations of the last run


class Operation(Protocol):
    """What was given to a device; a `dist.Work` is one."""

    def wait(self) -> object:
        """Let the current stream wait for it."""
        ...

    def is_completed(self) -> bool:
        """Whether the device has come to its end."""
        ...


class Edge(Protocol):
    """Moves tensors between this rank and one neighbour.

    Attributes:
        peer: Pipeline rank at the other end.
        bytes_sent: Of tensors.
        bytes_received: Of tensors.
    """

    peer: int
    bytes_sent: int
    bytes_received: int

    @property
    def copied(self) -> int:
        """Messages that this rank's device has copied out of the peer's memory."""
        ...

    def peer_copied(self, count: int) -> None:
        """The peer has `copied` so many: their memory is free here."""
        ...

    def warm_up(self) -> None:
        """Make connections; on both ends, by all ranks in the order of `neighbours`."""
        ...

    def send(self, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        """Launch the sending of tensors behind what the current stream has been given so far.

        Args:
            layout: How they lie in the message; starts at byte 0.
            tensors: One for each spec of the layout; what is None leaves its place undefined.
        """
        ...

    def receive(self, layout: Layout) -> "Arrival":
        """Launch the receive of what the peer sends next."""
        ...

    def settle(self) -> None:
        """Wait for the operations of the last run: the host is never more than one step ahead of the device.

        Raises:
            LinkError: The lookout has ended the wait, or it took longer than the link allows.
        """
        ...

    def abort(self) -> None:
        """Drop what the edge holds."""
        ...


class Arrival:
    """A receive that was launched; its tensors can be used on the current stream once `tensors` has returned.

    Args:
        work: The operation; None where no byte travels.
        buffer: What it fills.
        layout: What lies in the buffer.
        link: By which the host waits; None for a device, whose stream waits.
    """

    def __init__(self, work: Operation | None, buffer: Tensor, layout: Layout, link: Link | None) -> None:
        self._work, self._buffer, self._layout, self._link = work, buffer, layout, link

    def tensors(self) -> list[Tensor]:
        """Views of what arrives. The current stream waits for it; the host does not, except on CPU."""
        if self._work is not None:
            wait_for(self._work, self._link)
            if self._buffer.device.type != "cpu":  # allocated on the receiving stream, used on this one
                module = torch.get_device_module(self._buffer.device)
                self._buffer.record_stream(module.current_stream(self._buffer.device))
        return self._layout.view(self._buffer)


def wait_for(work: Operation, link: Link | None) -> None:
    """Let the current stream wait, or on CPU the host.

    Args:
        work: The operation.
        link: By which the host waits. NCCL's `wait` would block the host if it were given a timeout.
    """
    if link is not None:
        wait_until(work.is_completed, lambda: None, link)
    work.wait()


def wait_until(is_over: Callable[[], bool], look: Callable[[], object], link: Link) -> None:
    """Look at operations until they are over; the host sleeps meanwhile, and the lookout watches.

    Raises:
        LinkError: The lookout has ended the wait, or it took longer than the link allows.
    """
    if is_over():
        return
    deadline = time.monotonic() + link.timeout.total_seconds()
    with link.waiting() as wait:
        while not is_over():
            if wait.is_over or time.monotonic() > deadline:
                raise LinkError(link.peer, timed_out=True, reason="tensors that were launched did not arrive")
            time.sleep(_PAUSE)
            look()


class Communicators:
    """An edge of two communicators, such as NCCL's.

    Args:
        link: To the neighbour, whose hosts it joins.
        outgoing: Two-rank group for what leaves.
        incoming: Two-rank group for what arrives.
        device: Where the tensors live.
    """

    copied = 0

    def __init__(
        self, link: Link, outgoing: dist.ProcessGroup, incoming: dist.ProcessGroup, *, device: torch.device
    ) -> None:
        self._link, self.peer = link, link.peer
        self.bytes_sent = self.bytes_received = 0
        self._outgoing: dist.ProcessGroup | None = outgoing
        self._incoming: dist.ProcessGroup | None = incoming
        self._peer_in_group = 1 - outgoing.rank()
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device)
        # An operation and what it reads or fills, until the device has come to its end.
        self._launched: deque[tuple[dist.Work, Tensor]] = deque()

    def warm_up(self) -> None:
        """Exchange a byte each way: connections are made at the first exchange, and that blocks the host.

        Called on both ends, by all ranks in the order of `neighbours`.
        """
        assert self._outgoing is not None, "an aborted edge sends nothing"
        assert self._incoming is not None, "an aborted edge receives nothing"
        out, into = (torch.zeros(1, dtype=torch.uint8, device=self._device) for _ in range(2))
        first, second = (self._outgoing.send, self._incoming.recv), (self._incoming.recv, self._outgoing.send)
        for operation in first if self._is_lower else second:
            tensor = out if operation == self._outgoing.send else into
            wait_for(operation([tensor], self._peer_in_group, 0), self._host_link)

    def peer_copied(self, count: int) -> None:
        """A communicator's messages are free when they have ended."""

    @property
    def _is_lower(self) -> bool:
        return self._peer_in_group == 1

    @property
    def _host_link(self) -> Link | None:
        return None if self._stream is not None else self._link

    def send(self, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        """Launch the sending of tensors behind what the current stream has been given so far.

        Args:
            layout: How they lie in the message; starts at byte 0.
            tensors: One for each spec of the layout; what is None leaves its place undefined.
        """
        if not travels(layout, tensors):
            return
        assert self._outgoing is not None, "an aborted edge sends nothing"
        self._let_go()
        payload = _as_it_lies(layout, tensors)
        if payload is None:
            payload = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
            places = layout.view(payload)
            for place, tensor in zip(places, tensors, strict=True):
                if tensor is not None:
                    place.copy_(tensor.detach())
        work = self._launch(self._outgoing.send, payload)
        self._launched.append((work, payload))
        self.bytes_sent += payload.numel()

    def receive(self, layout: Layout) -> Arrival:
        """Launch the receive of what the peer sends next."""
        assert self._incoming is not None, "an aborted edge receives nothing"
        self._let_go()
        size = bare_bytes(layout)
        # An operation waits for the stream on which it is launched: on the compute stream this one would
        # wait for the work that is to hide it.
        with nullcontext() if self._stream is None else self._module.stream(self._stream):
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            work = self._launch(self._incoming.recv, buffer) if size else None
        if work is not None:
            self._launched.append((work, buffer))
        self.bytes_received += size
        return Arrival(work, buffer, layout, self._host_link)

    def _launch(self, operation: Any, buffer: Tensor) -> dist.Work:
        try:
            work: dist.Work = operation([buffer], self._peer_in_group, 0)
        except RuntimeError as error:
            raise LinkError(self.peer, timed_out=False, reason=str(error).splitlines()[0]) from None
        return work

    def _let_go(self) -> None:
        """Drop what operations have read or filled that have ended: what was sent need not be held."""
        while self._launched and self._launched[0][0].is_completed():
            self._launched.popleft()

    def settle(self) -> None:
        """Wait for the operations of the last run: the host is never more than one step ahead of the device.

        Raises:
            LinkError: The lookout has ended the wait, or it took longer than the link allows.
        """
        self._let_go()
        wait_until(lambda: not self._launched, self._let_go, self._link)

    def abort(self) -> None:
        """Drop groups and operations."""
        self._launched.clear()
        self._outgoing = self._incoming = None


def travels(layout: Layout, tensors: Sequence[Tensor | None]) -> bool:
    """Whether there is a byte to send."""
    return bare_bytes(layout) > 0 and any(tensor is not None for tensor in tensors)


def bare_bytes(layout: Layout) -> int:
    """Bytes that travel: a single tensor travels as it lies in memory, without padding behind it."""
    if len(layout.specs) == 1:
        spec: TensorSpec = layout.specs[0]
        count = 1
        for size in spec.shape:
            count *= size
        return count * spec.dtype.itemsize
    return layout.num_bytes


def _as_it_lies(layout: Layout, tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The bytes of a message's only tensor, if it is dense and lies as the layout says; else None."""
    if len(tensors) != 1 or (tensor := tensors[0]) is None:
        return None
    spec = layout.specs[0]
    tensor = tensor.detach()
    if tuple(tensor.stride()) != spec.stride:
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device).copy_(
            tensor
        )
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
