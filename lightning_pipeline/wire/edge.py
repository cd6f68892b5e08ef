"""Tensors to and from one neighbouring rank by communicators of the device, one for each direction.

A link tells the peer's host what comes (the header); an edge moves the tensors behind it. Operations of an
edge are launched in the order of `schedules.communicate`, which is free of deadlock even where a device
runs everything that a rank has launched one after the other, and a send ends only when its receive runs:
NCCL and CUDA promise no more than that.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.wire.link import LinkError
from lightning_pipeline.wire.packing import Layout, TensorSpec

_PAUSE = 0.0005  # seconds between looks at operations of the last run


class Arrival:
    """A receive that was launched; its tensors can be used on the current stream once `tensors` has returned.

    Args:
        work: The operation; None where no byte travels.
        buffer: What it fills.
        layout: What lies in the buffer.
        timeout: Longest wait of the host; None for a device, whose stream waits.
    """

    def __init__(
        self, work: dist.Work | None, buffer: Tensor, layout: Layout, timeout: timedelta | None
    ) -> None:
        self._work, self._buffer, self._layout, self._timeout = work, buffer, layout, timeout

    def tensors(self) -> list[Tensor]:
        """Views of what arrives. The current stream waits for it; the host does not, except on CPU."""
        if self._work is not None:
            wait_for(self._work, self._timeout)
            if self._buffer.is_cuda:  # allocated on the receiving stream, used on this one
                self._buffer.record_stream(torch.cuda.current_stream(self._buffer.device))
        return self._layout.view(self._buffer)


def wait_for(work: dist.Work, timeout: timedelta | None) -> None:
    """Let the current stream wait, or on CPU the host.

    Args:
        work: The operation.
        timeout: Of the host. With one, NCCL's `wait` blocks the host, so that a device is given none.
    """
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)


class Edge:
    """Moves tensors between this rank and one neighbour.

    Args:
        peer: Pipeline rank at the other end.
        outgoing: Two-rank group for what leaves.
        incoming: Two-rank group for what arrives.
        device: Where the tensors live.
        timeout: Longest time that an operation may take after the step in which it was launched.

    Attributes:
        host_waits: How often the host has waited for tensors of a device in a step: never.
    """

    def __init__(
        self,
        peer: int,
        outgoing: dist.ProcessGroup,
        incoming: dist.ProcessGroup,
        *,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.peer = peer
        self.bytes_sent = self.bytes_received = 0
        self._outgoing: dist.ProcessGroup | None = outgoing
        self._incoming: dist.ProcessGroup | None = incoming
        self._peer_in_group = 1 - outgoing.rank()
        self._device, self._timeout = device, timeout
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
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
            wait_for(operation([tensor], self._peer_in_group, 0), self._host_timeout)

    @property
    def _is_lower(self) -> bool:
        return self._peer_in_group == 1

    @property
    def _host_timeout(self) -> timedelta | None:
        return None if self._stream is not None else self._timeout

    def send(self, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        """Launch the sending of tensors behind what the current stream has been given so far.

        Args:
            layout: How they lie in the message; starts at byte 0.
            tensors: One for each spec of the layout; what is None leaves its place undefined.
        """
        if not _bare_bytes(layout) or all(tensor is None for tensor in tensors):
            return
        assert self._outgoing is not None, "an aborted edge sends nothing"
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
        size = _bare_bytes(layout)
        # An operation waits for the stream on which it is launched: on the compute stream this one would
        # wait for the work that is to hide it.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            work = self._launch(self._incoming.recv, buffer) if size else None
        if work is not None:
            self._launched.append((work, buffer))
        self.bytes_received += size
        return Arrival(work, buffer, layout, self._host_timeout)

    def _launch(self, operation: Any, buffer: Tensor) -> dist.Work:
        try:
            work: dist.Work = operation([buffer], self._peer_in_group, 0)
        except RuntimeError as error:
            raise LinkError(self.peer, timed_out=False, reason=str(error).splitlines()[0]) from None
        return work

    def settle(self) -> None:
        """Wait for the operations of the last run: the host is never more than one step ahead of the device.

        Raises:
            LinkError: One has not ended within the timeout.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        while self._launched:
            if self._launched[0][0].is_completed():
                self._launched.popleft()
            elif time.monotonic() > deadline:
                raise LinkError(self.peer, timed_out=True, reason="tensors that were launched did not arrive")
            else:
                time.sleep(_PAUSE)

    def abort(self) -> None:
        """Drop groups and operations."""
        self._launched.clear()
        self._outgoing = self._incoming = None


def _bare_bytes(layout: Layout) -> int:
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
