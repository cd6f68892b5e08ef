"""How far the clocks of a pipeline's ranks are apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_pipeline.ranks.failure import Failure
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.recording import now


@dataclass(frozen=True)
class Offset:
    """How far a rank's clock is from pipeline rank 0's.

    Args:
        nanoseconds: What to take from the rank's times to have them on rank 0's clock.
        round_trip: Of the exchange that it was measured with, in nanoseconds; the error is at most half.
    """

    nanoseconds: int = 0
    round_trip: int = 0


class Wire(Protocol):
    """Moves two integers between ranks of a pipeline."""

    def send(self, peer: int, first: int, second: int) -> None:
        """To a pipeline rank."""
        ...

    def receive(self, peer: int) -> tuple[int, int]:
        """Wait for those of a pipeline rank."""
        ...


class GroupWire:
    """Goes over a gloo group.

    Args:
        group: With all ranks of the pipeline, over gloo.
        ranks: Their global ranks, by pipeline rank.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks

    def send(self, peer: int, first: int, second: int) -> None:
        """To a pipeline rank."""
        dist.send(torch.tensor([first, second]), self._ranks[peer], group=self._group)

    def receive(self, peer: int) -> tuple[int, int]:
        """Wait for those of a pipeline rank."""
        buffer = torch.empty(2, dtype=torch.int64)
        dist.recv(buffer, self._ranks[peer], group=self._group)
        first, second = buffer.tolist()
        return first, second


def align(
    wire: Wire, rank: int, size: int, *, exchanges: int = 8, clock: Callable[[], int] = now
) -> list[Offset]:
    """Measure how far all clocks of a pipeline are from rank 0's; all its ranks call.

    Rank 0 and each other rank send a message back and forth; of some exchanges the one with the shortest
    round trip counts (as in NTP, RFC 5905, section 8). A clock that could be the same, because zero is within
    the error, is taken to be the same: processes of one machine share theirs.

    Args:
        wire: Between the ranks.
        rank: This pipeline rank.
        size: Ranks of the pipeline.
        exchanges: With each rank; about 0.1 ms each on one machine.
        clock: This rank's, in nanoseconds.

    Returns:
        Offsets by pipeline rank, the same list on all of them.
    """
    offsets = [Offset()]
    if rank == 0:
        for peer in range(1, size):
            offsets.append(min((_ask(wire, peer, clock) for _ in range(exchanges)), key=_round_trip))
        for peer in range(1, size):
            for offset in offsets[1:]:
                wire.send(peer, offset.nanoseconds, offset.round_trip)
        return offsets
    for _ in range(exchanges):
        wire.receive(0)
        arrived = clock()
        wire.send(0, arrived, clock())
    return offsets + [Offset(*wire.receive(0)) for _ in range(1, size)]


def _ask(wire: Wire, peer: int, clock: Callable[[], int]) -> Offset:
    sent = clock()
    wire.send(peer, 0, 0)
    arrived, answered = wire.receive(peer)
    received = clock()
    round_trip = (received - sent) - (answered - arrived)
    offset = ((arrived - sent) + (answered - received)) // 2
    return Offset(0 if 2 * abs(offset) <= round_trip else offset, round_trip)


def _round_trip(offset: Offset) -> int:
    return offset.round_trip


class Clocks:
    """How far the clocks of a replica's ranks are apart, as last measured.

    Args:
        groups: Whose control group carries the messages.
        failure: Tells the other ranks when this one fails meanwhile.
    """

    def __init__(self, groups: Groups, failure: Failure) -> None:
        self._groups, self._failure = groups, failure
        self.offsets: list[Offset] = []
        """By pipeline rank; empty before the first measurement."""

    def align(self, exchanges: int = 8) -> list[Offset]:
        """Measure; all ranks of the replica call. Returns offsets by pipeline rank, alike on all.

        Args:
            exchanges: With each rank; about 0.1 ms each on one machine.
        """
        groups = self._groups
        ranks = groups.numbering.pipelines()[groups.replica]
        with self._failure.watch("aligning clocks"):
            wire = GroupWire(groups.control, ranks)
            self.offsets = align(wire, groups.rank, len(ranks), exchanges=exchanges)
        return self.offsets
