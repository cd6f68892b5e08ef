"""Which messages a rank sent and received in a run, written down only while someone records."""

from typing import NamedTuple

from lightning_pipeline.recording.clock import now
from lightning_pipeline.schedules import Action


class Message(NamedTuple):
    """One message, as one of its two ends saw it. Times are nanoseconds of the monotonic clock.

    Args:
        action: `SEND_F`, `RECV_F` (values), `SEND_B` or `RECV_B` (gradients), with the stage at this end.
        peer: Pipeline rank at the other end.
        num_bytes: Headers and metadata included.
        began: When this rank began to pack it, or to wait for it.
        ended: When it was handed to the communicator, or had arrived and was unpacked.
    """

    action: Action
    peer: int
    num_bytes: int
    began: int
    ended: int


class MessageLog:
    """The messages of the run that is going on, of all neighbours, in order.

    Attributes:
        messages: Since `begin`.
        seconds_inside: Spent here since the log was made.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.seconds_inside = 0.0

    def begin(self) -> None:
        """Forget the last run."""
        self.messages = []

    def add(self, action: Action, peer: int, num_bytes: int, began: int) -> None:
        """Write down a message that was handed over, or is unpacked, just now."""
        ended = now()
        self.messages.append(Message(action, peer, num_bytes, began, ended))
        self.seconds_inside += (now() - ended) / 1e9
