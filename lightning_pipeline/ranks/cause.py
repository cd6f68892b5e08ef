"""What went wrong first, and where: plain data that every rank of a run can read."""

import json
import traceback
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Where:
    """What a rank was doing, for a message to the user.

    Args:
        activity: Such as `2F3` or `averaging gradients`.
        stage: Index of the stage, None outside an action.
        microbatch: Index of the micro-batch, None outside an action.
    """

    activity: str
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        if self.stage is None:
            return self.activity
        return f"{self.activity} (stage {self.stage}, micro-batch {self.microbatch})"


@dataclass(frozen=True)
class Cause:
    """The first thing that went wrong anywhere.

    Args:
        rank: Pipeline rank where it happened.
        global_rank: Its number in the world.
        where: What that rank was doing.
        summary: Type and text of the exception.
        detail: Traceback, or last actions.
        timed_out: Whether a wait took longer than allowed.
        silent: Whether that rank cannot tell anything itself, nor read this soon: it is gone, stopped, or
            busy in the user's own code.
        advice: What more there is to say, such as what to change.
        asked: Whether that rank was asked to end, by SIGTERM: it did not fail.
    """

    rank: int
    global_rank: int
    where: str
    summary: str
    detail: str
    timed_out: bool = False
    silent: bool = False
    advice: str = ""
    asked: bool = False

    @property
    def who(self) -> str:
        """The rank, for a message."""
        return f"pipeline rank {self.rank} (global rank {self.global_rank})"

    def to_text(self) -> str:
        """As the store keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Cause":
        """What `to_text` wrote."""
        return cls(**json.loads(text))


def summary_of(error: BaseException) -> str:
    """Type and text of an exception; of one that cannot be printed its type."""
    return "".join(traceback.format_exception_only(error)).strip()
