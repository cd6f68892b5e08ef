"""One thing that one stage does to one micro-batch, and how it is written: `2F0`."""

import re
from typing import Final, NamedTuple

from lightning_pipeline.errors import ScheduleError

FORWARD: Final = "F"
BACKWARD: Final = "B"
BACKWARD_INPUT: Final = "I"
BACKWARD_WEIGHT: Final = "W"
SEND_F: Final = "SEND_F"
RECV_F: Final = "RECV_F"
SEND_B: Final = "SEND_B"
RECV_B: Final = "RECV_B"

COMPUTE: Final = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
MESSAGES: Final = (SEND_F, RECV_F, SEND_B, RECV_B)

_PATTERN = re.compile(rf"(\d+)({'|'.join((*MESSAGES, *COMPUTE))})(\d+)")


class Action(NamedTuple):
    """One thing that one stage does to one micro-batch. Prints as torch writes it.

    Args:
        stage: Index of the stage, 0 for the one that sees the batch.
        kind: `F` forward, `B` full backward, `I` input-gradient half, `W` weight-gradient half;
            with messages also `SEND_F`, `RECV_F`, `SEND_B`, `RECV_B`, named after what travels.
        microbatch: Index of the micro-batch.

    Example:
        >>> str(Action(2, "F", 0)), Action.parse("2F0") == Action(2, "F", 0)
        ('2F0', True)
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read what `str` wrote.

        Args:
            text: Stage, kind and micro-batch without spaces between, such as `2F0`.

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text.strip()!r} is not an action: write stage, kind ({', '.join(COMPUTE)}) and "
                f"micro-batch, such as 2F0"
            )
        return cls(int(match[1]), match[2], int(match[3]))
