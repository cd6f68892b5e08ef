"""What arrives from one neighbouring rank: expected in its order, received one message ahead, checked."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.errors import BatchMismatchError, ConfigMismatchError, MessageError
from lightning_pipeline.recording import now
from lightning_pipeline.schedules import Action
from lightning_pipeline.wire import header as wire
from lightning_pipeline.wire.agreement import Agreement, Agreements
from lightning_pipeline.wire.edge import Edge
from lightning_pipeline.wire.header import Header, header_bytes, read_header
from lightning_pipeline.wire.link import Link
from lightning_pipeline.wire.packing import Layout
from lightning_pipeline.wire.stage import Values

_KINDS = {wire.OPEN: "opening", wire.FORWARD: "values", wire.BACKWARD: "gradients"}
Content = Values | list[Tensor | None]


class Key(NamedTuple):
    """Which message: its kind, the stage that it is for, the micro-batch."""

    kind: int
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{_KINDS.get(self.kind, self.kind)} of micro-batch {self.microbatch} for stage {self.stage}"


class Opening(NamedTuple):
    """What must be the same on both ends before the first message of a run."""

    number: int
    plan: int
    signatures: int
    num_microbatches: int


class Inbox:
    """Receives from one neighbouring rank.

    Args:
        link: Moves the bytes.
        device: Where received tensors live. Those of an accelerator come through pinned host memory.
        sent: By stage and micro-batch what was agreed on for values sent to the peer, None for an empty
            micro-batch: the sizes of the gradients that come back.
        edge: Moves the tensors behind the headers; None where they are in the message.
    """

    def __init__(
        self,
        link: Link,
        *,
        device: torch.device,
        sent: dict[tuple[int, int], Agreement | None],
        edge: Edge | None = None,
    ) -> None:
        self.taken: dict[tuple[int, int], Agreement] = {}
        self._link, self._edge = link, edge
        self._device = device
        self._pinned = device.type == "cuda"
        self._sent = sent
        self._agreements = Agreements()
        self._opening = Opening(0, 0, 0, 0)
        self._expected: deque[Key] = deque()
        self._arrived: dict[Key, Callable[[], Content]] = {}
        self._unpack: dict[int, Callable[[Key, Header, Tensor], None]] = {
            wire.OPEN: self._unpack_opening,
            wire.FORWARD: self._unpack_values,
            wire.BACKWARD: self._unpack_gradients,
        }

    @property
    def idle_bytes(self) -> int:
        """Buffers for gradients that are kept to be filled again."""
        return self._agreements.idle_bytes

    def begin(self, expected: Iterable[Key], signatures: Sequence[Hashable], opening: Opening) -> Key:
        """Expect the messages of a run, the peer's opening first; returns the opening's key."""
        self._agreements.begin(signatures)
        self._opening = opening
        first = Key(wire.OPEN, opening.number, opening.num_microbatches)
        self._expected.extend((first, *expected))
        self.post_ahead()
        return first

    def end(self) -> None:
        """Let what was new in the run become agreed."""
        assert not self._arrived, "every message that arrived was used"
        self.post_ahead()
        while self._expected:  # only the opening of a peer that sends nothing in this run
            self._take_next()
        self._agreements.commit()
        self.taken.clear()

    def receive(self, key: Key) -> Content:
        """Wait for a message; those that come before it are kept."""
        while key not in self._arrived:
            self._take_next()
        return self._arrived.pop(key)()

    def launch(self, key: Key) -> None:
        """Wait for the header of a message and launch the receive of its tensors."""
        nothing = key.kind == wire.BACKWARD and self._sent[key.stage, key.microbatch] is None
        while not nothing and key not in self._arrived:
            self._take_next()

    def post_ahead(self) -> None:
        """Post the receive of the next message, if none is posted and its size is known already."""
        while self._link.is_free and self._expected:
            kind, stage, microbatch = self._expected[0]
            if kind != wire.BACKWARD:
                self._link.post(self._size_of(kind, stage, microbatch), pinned=self._pinned)
            elif (stage, microbatch) not in self._sent:
                return
            elif (agreement := self._sent[stage, microbatch]) is None:
                self._expected.popleft()  # nothing was sent, nothing comes back
            else:
                self._link.post(agreement.gradient_bytes(self._edge is not None), pinned=self._pinned)

    def _size_of(self, kind: int, stage: int, microbatch: int) -> int:
        if kind == wire.OPEN:
            return header_bytes(0)
        agreed = self._agreements.get(stage, microbatch)
        return wire.METADATA_BYTES if agreed is None else agreed.message_bytes(self._edge is not None)

    def _take_next(self) -> None:
        if self._link.is_free:
            self.post_ahead()
        assert self._expected, "the plan has a receive without a send"
        key = self._expected[0]
        began, bytes_before = now(), self._bytes_received
        buffer = self._link.take()
        self._expected.popleft()
        header = self._checked(buffer, key)
        self._link.acknowledged(header.received)
        if self._edge is not None:
            self._edge.peer_copied(header.copied)
        self._unpack[key.kind](key, header, buffer)
        if self._link.log is not None and key.kind != wire.OPEN:
            action = Action(key.stage, "RECV_F" if key.kind == wire.FORWARD else "RECV_B", key.microbatch)
            self._link.log.add(action, self._link.peer, self._bytes_received - bytes_before, began)
        self.post_ahead()

    @property
    def _bytes_received(self) -> int:
        return self._link.bytes_received + (0 if self._edge is None else self._edge.bytes_received)

    def _checked(self, buffer: Tensor, key: Key) -> Header:
        header = read_header(buffer)
        sequence = self._link.received - 1
        found = Key(header.kind, header.stage, header.microbatch)
        if header.magic != wire.MAGIC or found != key or header.sequence != sequence:
            what = str(found) if header.magic == wire.MAGIC else "something that is none of our messages"
            raise MessageError(
                f"rank {self._link.peer} sent {what} (message {header.sequence}) where {key} (message "
                f"{sequence}) was expected: run the same plan and version of this package on all ranks"
            )
        return header

    def _check_agreed(self, header: Header, key: Key, agreed: Agreement, count: int) -> None:
        if header.checksum != agreed.checksum or (
            header.status == wire.AGREED and header.num_tensors != count
        ):
            raise MessageError(
                f"rank {self._link.peer} and this rank have agreed on different metadata for the {key}: "
                f"checksums {header.checksum:#x} and {agreed.checksum:#x}, "
                f"{header.num_tensors} and {count} tensors"
            )

    def _unpack_opening(self, key: Key, header: Header, buffer: Tensor) -> None:
        if header.checksum != self._opening.plan:
            raise ConfigMismatchError(
                f"rank {self._link.peer} runs another plan than this rank: give all ranks the same schedule, "
                f"stages and num_microbatches"
            )
        if header.size != self._opening.signatures:
            raise BatchMismatchError(
                f"rank {self._link.peer} has micro-batches of other shapes or types than this rank: all "
                f"ranks of a replica must load the same batches; check the sampler's seed and the dataset"
            )

    def _unpack_values(self, key: Key, header: Header, buffer: Tensor) -> None:
        _, stage, microbatch = key
        agreed = self._agreements.get(stage, microbatch)
        if agreed is not None:
            self._check_agreed(header, key, agreed, len(agreed.specs))
        if header.status == wire.EMPTY:
            self._arrived[key] = partial(Values, [], empty=True)
            return
        if header.status == wire.DEVIATES:
            if agreed is not None:
                header, buffer = self._take_more(key, wire.METADATA_BYTES)
            agreed = self._read_metadata(header, buffer)
            self._agreements.note(stage, microbatch, agreed)
            header, buffer = self._take_more(key, agreed.message_bytes(self._edge is not None))
            self._check_agreed(header, key, agreed, len(agreed.specs))
        assert agreed is not None, "values as agreed need an agreement"
        self.taken[stage, microbatch] = agreed
        arrived = self._arriving(agreed.layout, agreed.payload, buffer)
        self._arrived[key] = partial(self._values, agreed, arrived)

    def _arriving(self, layout: Layout, payload: Layout, buffer: Tensor) -> Callable[[], list[Tensor]]:
        """What gives the tensors of a message when they are needed: from its buffer, or by the edge."""
        if self._edge is not None:
            return self._edge.receive(payload).tensors
        return partial(layout.view, buffer.to(self._device))

    def _take_more(self, key: Key, num_bytes: int) -> tuple[Header, Tensor]:
        self._link.post(num_bytes, pinned=self._pinned)
        buffer = self._link.take()
        return self._checked(buffer, key), buffer

    def _read_metadata(self, header: Header, buffer: Tensor) -> Agreement:
        if header.size <= wire.METADATA_BYTES - header_bytes(0):
            return Agreement.read(wire.read_bytes(buffer, header_bytes(0), header.size))
        self._link.post(header.size)
        return Agreement.read(wire.read_bytes(self._link.take(), 0, header.size))

    @staticmethod
    def _values(agreed: Agreement, arrived: Callable[[], list[Tensor]]) -> Values:
        tensors = arrived()
        for index in agreed.with_gradient:
            tensors[index].requires_grad_()
        return Values(tensors, agreed.table)

    def _unpack_gradients(self, key: Key, header: Header, buffer: Tensor) -> None:
        agreement = self._sent.pop((key.stage, key.microbatch))
        assert agreement is not None, "an empty micro-batch gets no gradients"
        positions = agreement.with_gradient
        self._check_agreed(header, key, agreement, len(positions))
        missing = wire.read_missing(buffer, len(positions))
        if all(missing):
            self._arrived[key] = partial(list, [None] * len(agreement.specs))
            return
        arrived = self._arriving(agreement.gradients, agreement.gradient_payload, buffer)
        self._arrived[key] = partial(self._gradients, agreement, missing, arrived)

    @staticmethod
    def _gradients(
        agreement: Agreement, missing: Sequence[bool], arrived: Callable[[], list[Tensor]]
    ) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] * len(agreement.specs)
        for index, view, absent in zip(agreement.with_gradient, arrived(), missing, strict=True):
            gradients[index] = None if absent else view
        return gradients
