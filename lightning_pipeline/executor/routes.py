"""What a plan means for the messages of one rank: which neighbour, in which order."""

import zlib
from collections.abc import Hashable, Mapping, Sequence

from lightning_pipeline.schedules import Action, Plan
from lightning_pipeline.schedules.plans import RECV_F, communicate
from lightning_pipeline.wire import BACKWARD, FORWARD, Channel, Key, Opening

_SENDS_GRADIENTS = ("B", "I")


class Routes:
    """What a plan means for the messages of this rank; worked out once per plan."""

    def __init__(self, rank: int, channels: Mapping[int, Channel]) -> None:
        self._rank = rank
        self._channels = channels
        self._plan: Plan | None = None
        self._digests: dict[Hashable, int] = {}
        self.last = 0
        self.channel_of: list[Channel | None] = []
        self.expected: dict[int, list[Key]] = {}
        self.steps: Sequence[Action] = ()
        self._checksum = 0

    def follow(self, plan: Plan) -> None:
        """Work out, unless that was the last plan too, where each stage is and what each peer will send."""
        if plan is self._plan or plan == self._plan:
            return
        self._plan = plan
        self.last = plan.num_stages - 1
        self.channel_of = [self._channels.get(plan.rank_of(stage)) for stage in range(plan.num_stages)]
        self.expected = {peer: self._messages(plan, peer) for peer in self._channels}
        if any(channel.edge is not None for channel in self._channels.values()):
            self.steps = communicate(plan)[self._rank]
        self._checksum = zlib.crc32(str(plan).encode())

    def _messages(self, plan: Plan, peer: int) -> list[Key]:
        """What a peer sends to this rank, in the order of its actions."""
        keys = []
        for stage, kind, microbatch in plan[peer]:
            if kind == "F" and stage < self.last and plan.rank_of(stage + 1) == self._rank:
                keys.append(Key(FORWARD, stage + 1, microbatch))
            elif kind in _SENDS_GRADIENTS and stage > 0 and plan.rank_of(stage - 1) == self._rank:
                keys.append(Key(BACKWARD, stage - 1, microbatch))
        return keys

    def launch(self, receive: Action) -> None:
        """Launch a receive: here is its place among the operations of this rank."""
        stage, kind, microbatch = receive
        if kind == RECV_F:
            channel, what = self.channel_of[stage - 1], FORWARD
        else:
            channel, what = self.channel_of[stage + 1], BACKWARD
        assert channel is not None, "a message comes from another rank"
        channel.launch(what, stage, microbatch)

    def opening(self, number: int, signatures: Sequence[Hashable]) -> Opening:
        """What both ends compare before the first message."""
        digest = 0
        for signature in signatures:
            digest = zlib.crc32(self._digest(signature).to_bytes(4, "little"), digest)
        return Opening(number, self._checksum, digest, len(signatures))

    def _digest(self, signature: Hashable) -> int:
        if signature not in self._digests:
            if len(self._digests) >= 4096:
                self._digests.clear()
            self._digests[signature] = zlib.crc32(repr(signature).encode())
        return self._digests[signature]
