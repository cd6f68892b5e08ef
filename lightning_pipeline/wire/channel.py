"""The two cuts' worth of messages between this rank and one neighbour: values one way, gradients back.

One message per cut and micro-batch: header, then all tensors. What a message looks like was agreed before
the run, so its receive is posted ahead with the exact size. Values that are not as agreed say so in a
message of the agreed size, and metadata and the values themselves follow.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_pipeline.errors import MessageError
from lightning_pipeline.recording import now
from lightning_pipeline.schedules import Action
from lightning_pipeline.wire import header as wire
from lightning_pipeline.wire.agreement import Agreement, Agreements
from lightning_pipeline.wire.edge import Edge
from lightning_pipeline.wire.header import Header, header_bytes, write_header
from lightning_pipeline.wire.inbox import Inbox, Key, Opening
from lightning_pipeline.wire.link import Link
from lightning_pipeline.wire.packing import Parcel
from lightning_pipeline.wire.stage import Values


class Channel:
    """Sends to and receives from one neighbouring rank.

    Args:
        link: Moves the bytes.
        device: Where the tensors live. Without an edge, those of an accelerator go through pinned memory.
        edge: Moves the tensors, where they go from device to device; the link then carries headers alone.
    """

    def __init__(self, link: Link, *, device: torch.device, edge: Edge | None = None) -> None:
        self.link, self.edge = link, edge
        self._pinned = device.type == "cuda"
        self._agreements = Agreements()
        self._sent: dict[tuple[int, int], Agreement | None] = {}
        self._inbox = Inbox(link, device=device, sent=self._sent, edge=edge)

    @property
    def bytes_sent(self) -> int:
        """Headers and tensors."""
        return self.link.bytes_sent + (0 if self.edge is None else self.edge.bytes_sent)

    @property
    def buffer_bytes(self) -> int:
        """The most that buffers of messages have taken: in flight, posted, or kept to be filled again."""
        return max(self.link.peak_bytes, self._agreements.idle_bytes + self._inbox.idle_bytes)

    def begin(self, expected: Iterable[Key], signatures: Sequence[Hashable], opening: Opening) -> None:
        """Start a run: tell the peer what it is about and expect its messages.

        Args:
            expected: Messages of the peer, in the order in which it sends them.
            signatures: Per micro-batch what its metadata is remembered by; the same on both ends.
            opening: What both ends must agree on; compared before the first message is received.
        """
        if self.edge is not None:
            self.edge.settle()
        self._agreements.begin(signatures)
        key = self._inbox.begin(expected, signatures, opening)
        buffer = torch.empty(header_bytes(0), dtype=torch.uint8)
        self.link.send(self._write(buffer, key, checksum=opening.plan, size=opening.signatures))

    def end(self) -> None:
        """Finish a run: wait until the peer has all messages, and let new agreements enter."""
        self._inbox.end()
        self.link.flush()
        self._agreements.commit()
        self._sent.clear()

    def send_values(self, stage: int, microbatch: int, values: Values) -> None:
        """Send what a stage hands to `stage` on the peer."""
        began, bytes_before = now(), self.bytes_sent
        key = Key(wire.FORWARD, stage, microbatch)
        agreed = self._agreements.get(stage, microbatch)
        if values.empty:
            self._sent[stage - 1, microbatch] = None
            self.link.send(self._plain(key, agreed, wire.EMPTY))
        else:
            actual = agreed if agreed is not None and agreed.covers(values) else Agreement.of(values)
            if actual is not agreed:
                for buffer in self._deviation(key, agreed, actual):
                    self.link.send(buffer)
            self._sent[stage - 1, microbatch] = actual
            self._send_tensors(key, actual, values.tensors)
        self._log(Action(stage - 1, "SEND_F", microbatch), began, bytes_before)
        if self.link.is_free:  # the gradients' size is known now
            self._inbox.post_ahead()

    def _log(self, action: Action, began: int, bytes_before: int) -> None:
        if self.link.log is not None:
            self.link.log.add(action, self.link.peer, self.bytes_sent - bytes_before, began)

    def _deviation(self, key: Key, agreed: Agreement | None, actual: Agreement) -> Iterator[Tensor]:
        """Messages before values that are not as agreed: that they are not, and what they are."""
        if agreed is not None:
            yield self._plain(key, agreed, wire.DEVIATES)
        self._agreements.note(key.stage, key.microbatch, actual)
        first = torch.empty(wire.METADATA_BYTES, dtype=torch.uint8)
        fits = len(actual.data) <= wire.METADATA_BYTES - header_bytes(0)
        if fits:
            wire.write_bytes(first, header_bytes(0), actual.data)
        yield self._write(first, key, status=wire.DEVIATES, size=len(actual.data))
        if not fits:
            rest = torch.empty(len(actual.data), dtype=torch.uint8)
            wire.write_bytes(rest, 0, actual.data)
            yield rest

    def _plain(self, key: Key, agreed: Agreement | None, status: int) -> Tensor:
        """A message of the size that the peer waits for, with nothing behind its header."""
        size = wire.METADATA_BYTES if agreed is None else agreed.message_bytes(self.edge is not None)
        checksum = 0 if agreed is None else agreed.checksum
        return self._write(torch.empty(size, dtype=torch.uint8), key, status=status, checksum=checksum)

    def send_gradients(self, stage: int, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Send back to `stage` on the peer the gradients of what it sent, one entry per tensor."""
        began, bytes_before = now(), self.bytes_sent
        agreement = self._inbox.taken.pop((stage + 1, microbatch))
        chosen = [gradients[index] for index in agreement.with_gradient]
        for spec, gradient in zip(agreement.gradients.specs, chosen, strict=True):
            if gradient is not None and (tuple(gradient.shape), gradient.dtype) != (spec.shape, spec.dtype):
                raise MessageError(
                    f"the gradient for stage {stage}, micro-batch {microbatch}, is {tuple(gradient.shape)} "
                    f"of {gradient.dtype}, but its tensor was {spec.shape} of {spec.dtype}"
                )
        key = Key(wire.BACKWARD, stage, microbatch)
        self._send_tensors(key, agreement, chosen, missing=[g is None for g in chosen])
        self._log(Action(stage + 1, "SEND_B", microbatch), began, bytes_before)

    def _send_tensors(
        self, key: Key, agreement: Agreement, tensors: Sequence[Tensor | None], missing: Sequence[bool] = ()
    ) -> None:  # fmt: skip
        """Header and tensors in one message; with an edge, the header, so that the peer's host knows what
        comes, and then the tensors by the edge.
        """
        forward, edge, release = key.kind == wire.FORWARD, self.edge, None
        if edge is None:
            parcel = Parcel.of(agreement.layout if forward else agreement.gradients, pinned=self._pinned)
            parcel.fill(tensors)
            buffer, release = parcel.buffer, parcel.release
        else:
            buffer = torch.empty(header_bytes(len(missing)), dtype=torch.uint8)
        self._write(buffer, key, checksum=agreement.checksum, count=len(tensors), missing=missing)
        self.link.send(buffer, release=release)
        if edge is not None:
            edge.send(agreement.payload if forward else agreement.gradient_payload, tensors)

    def launch(self, kind: int, stage: int, microbatch: int) -> None:
        """Launch the receive of tensors that an edge moves: here is its place in the order.

        The host waits for the header, which the peer's host writes when it launches the send. Without an
        edge there is nothing to do: sends do not wait for receives, and one is posted ahead at all times.
        """
        if self.edge is not None:
            self._inbox.launch(Key(kind, stage, microbatch))

    def _write(
        self, buffer: Tensor, key: Key, *, status: int = wire.AGREED, checksum: int = 0, count: int = 0,
        size: int = 0, missing: Sequence[bool] = (),
    ) -> Tensor:  # fmt: skip
        """The buffer, with the header of the next message."""
        link = self.link
        fields = Header(wire.MAGIC, key.kind, status, key.stage, key.microbatch, link.sent, link.received,
                        checksum, count, size, 0 if self.edge is None else self.edge.copied)  # fmt: skip
        write_header(buffer, fields, missing)
        return buffer

    def receive_values(self, stage: int, microbatch: int) -> Values:
        """Wait for what the peer hands to `stage`; the tensors are autograd leaves."""
        values = self._inbox.receive(Key(wire.FORWARD, stage, microbatch))
        assert isinstance(values, Values), "a forward message holds values"
        return values

    def receive_gradients(self, stage: int, microbatch: int) -> list[Tensor | None]:
        """Wait for the gradients of what `stage` sent, one entry per tensor."""
        gradients = self._inbox.receive(Key(wire.BACKWARD, stage, microbatch))
        assert isinstance(gradients, list), "a backward message holds gradients"
        return gradients
