"""Bytes to and from one neighbouring rank: two communicators, one for each direction."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.recording import MessageLog
from lightning_pipeline.wire.waits import Wait, Waits


class LinkError(PipelineError):
    """Bytes did not arrive or could not leave. The executor turns this into the first cause.

    Args:
        peer: Pipeline rank at the other end.
        timed_out: Whether the time was up; otherwise the connection is gone.
        reason: What the communicator said.
    """

    def __init__(self, peer: int, *, timed_out: bool, reason: str) -> None:
        super().__init__(
            f"{'no message from' if timed_out else 'lost the connection to'} rank {peer}: {reason}"
        )
        self.peer = peer
        self.timed_out = timed_out


class _Sent:
    """A buffer in flight, held together with its handle until the peer has it."""

    __slots__ = ("buffer", "release", "work")

    def __init__(self, work: dist.Work, buffer: Tensor, release: Callable[[], None] | None) -> None:
        self.work = work
        self.buffer = buffer
        self.release = release


class Link:
    """Moves bytes between this rank and one neighbour, first in, first out on each direction.

    Tensors and handles are held until `wait` of the handle has returned: gloo corrupts silently
    otherwise. They live in attributes, never in local variables that a traceback would keep: the peer of
    an aborted link is free only when the last reference to group and handles is gone.

    Args:
        peer: Pipeline rank at the other end.
        outgoing: Two-rank group for what leaves.
        incoming: Two-rank group for what arrives.
        timeout: Longest wait for one message, should the lookout not end it.
        waits: Where waits are told to the lookout. Default: nowhere.

    Attributes:
        where: Tells what this rank is doing, for messages about its waits.
        sent: Messages that left; `bytes_sent` their bytes.
        received: Messages that arrived; `bytes_received` their bytes.
        log: Where messages are written down; `None` while nobody records.
        peak_bytes: The most that buffers in flight and the posted one have taken.
    """

    def __init__(
        self, peer: int, outgoing: dist.ProcessGroup, incoming: dist.ProcessGroup, *, timeout: timedelta,
        waits: Waits | None = None,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.where: Callable[[], str] = lambda: "the start of a step"
        self._waits = Waits() if waits is None else waits
        ranks = tuple(dist.get_process_group_ranks(outgoing))
        self._leaving = Wait(lambda: f"{self.where()} (for rank {peer} to take a message)", ranks, outgoing)
        self._arriving = Wait(lambda: f"{self.where()} (for a message of rank {peer})", ranks, incoming)
        self.sent = 0
        self.received = 0
        self.bytes_sent = self.bytes_received = 0
        self.log: MessageLog | None = None
        self.timeout = timeout
        self.peak_bytes = self._bytes = 0
        self._outgoing: dist.ProcessGroup | None = outgoing
        self._incoming: dist.ProcessGroup | None = incoming
        self._peer_in_group = 1 - outgoing.rank()
        self._in_flight: deque[_Sent] = deque()
        self._posted: tuple[dist.Work, Tensor] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank comes first of the two, where one must."""
        return self._peer_in_group == 1

    @property
    def is_free(self) -> bool:
        """Whether no receive is posted that was not waited for."""
        return self._posted is None

    def send(self, buffer: Tensor, *, release: Callable[[], None] | None = None) -> None:
        """Start to send a buffer. It must not change until `release` is called.

        Args:
            buffer: Bytes in host memory.
            release: Called once the buffer is free again.
        """
        assert self._outgoing is not None, "an aborted link sends nothing"
        try:
            self._in_flight.append(
                _Sent(self._outgoing.send([buffer], self._peer_in_group, 0), buffer, release)
            )
        except RuntimeError as error:
            raise self._explain(error) from None
        self.sent += 1
        self.bytes_sent += buffer.numel()
        self._take_up(buffer.nbytes)

    def acknowledged(self, count: int) -> None:
        """Free the buffers of the first `count` messages sent: the peer says that it has them."""
        while self._in_flight and self.sent - len(self._in_flight) < count:
            self._wait_for_oldest()

    def flush(self) -> None:
        """Wait until the peer has everything that was sent."""
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self._wait_for(self._in_flight[0].work, self._leaving)
        self._bytes -= self._in_flight[0].buffer.nbytes
        release = self._in_flight.popleft().release
        if release is not None:
            release()

    def post(self, num_bytes: int, *, pinned: bool = False) -> None:
        """Start to receive the next message into a new buffer.

        Args:
            num_bytes: Its exact length: gloo leaves the rest of a longer buffer stale without an error,
                and ends the process when the buffer is shorter.
            pinned: Whether to page-lock the buffer.
        """
        assert self._incoming is not None, "an aborted link receives nothing"
        assert self._posted is None, "one receive is posted ahead, never two"
        buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        try:
            self._posted = (self._incoming.recv([buffer], self._peer_in_group, 0), buffer)
        except RuntimeError as error:
            raise self._explain(error) from None
        self._take_up(num_bytes)

    def _take_up(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        if self._bytes > self.peak_bytes:
            self.peak_bytes = self._bytes

    def take(self) -> Tensor:
        """Wait for the posted message and return its buffer."""
        assert self._posted is not None, "a message is posted before it is taken"
        self._wait_for(self._posted[0], self._arriving)
        buffer = self._posted[1]
        self._posted = None
        self._bytes -= buffer.nbytes
        self.received += 1
        self.bytes_received += buffer.numel()
        return buffer

    def _wait_for(self, work: dist.Work, wait: Wait) -> None:
        self._waits.enter(wait)
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            raise self._explain(error) from None
        finally:
            self._waits.leave()

    @contextmanager
    def waiting(self) -> Iterator[Wait]:
        """The block waits for tensors of the peer, beside this link; the lookout says when it is over."""
        text = f"(for tensors of rank {self.peer})"
        wait = Wait(lambda: f"{self.where()} {text}", self._leaving.ranks, None, looks=True)
        with self._waits.inside(wait) as counted:
            yield counted

    def _explain(self, error: RuntimeError) -> RuntimeError:
        """What the communicator raised is a lost peer; what a signal's handler raised meanwhile is itself."""
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            return error
        reason = str(error).splitlines()[0]
        return LinkError(self.peer, timed_out="imed out" in reason, reason=reason)

    def abort(self) -> None:
        """Drop group and handles, so that the peer sees a closed connection at once."""
        self._in_flight.clear()
        self._posted = self._outgoing = self._incoming = self._leaving.group = self._arriving.group = None
