"""What did happen: when each action of the last run asked for its input, started, and ended."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_pipeline.schedules import Action

clock = time.monotonic_ns


class Event(NamedTuple):
    """One action of a run. Times are nanoseconds of the monotonic clock, shared by processes of a machine.

    Args:
        action: What was done.
        asked: When the rank turned to it and began to wait for its input.
        started: When the input was there and the stage began to work.
        ended: When the stage had finished.
    """

    action: Action
    asked: int
    started: int
    ended: int


class Timeline:
    """Records the actions of one run at a time; under a microsecond per action.

    Iterating gives an `Event` per action that has ended, in order.
    """

    def __init__(self) -> None:
        self.actions: Sequence[Action] = ()
        self._asked: list[int] = []
        self._started: list[int] = []
        self._ended: list[int] = []
        self._position = -1
        self.began = 0
        self.finished = 0

    def begin(self, actions: Sequence[Action]) -> None:
        """Forget the last run and make room for this one."""
        self.actions = actions
        if len(self._asked) < len(actions):
            self._asked, self._started, self._ended = ([0] * len(actions) for _ in range(3))
        self._position = -1
        self.finished = 0
        self.began = clock()

    def ask(self, position: int) -> None:
        """The rank turns to the action at this position."""
        self._position = position
        self._started[position] = self._ended[position] = 0
        self._asked[position] = clock()

    def start(self) -> None:
        """The input is there."""
        self._started[self._position] = clock()

    def end(self) -> None:
        """The stage has finished."""
        self._ended[self._position] = clock()

    def finish(self) -> None:
        """All messages of the run are delivered."""
        self.finished = clock()

    def __iter__(self) -> Iterator[Event]:
        for index in range(self._position + 1):
            event = Event(self.actions[index], self._asked[index], self._started[index], self._ended[index])
            if event.ended:
                yield event

    @property
    def current(self) -> Action | None:
        """The action that the rank is at, None before the first."""
        return self.actions[self._position] if self._position >= 0 else None

    @property
    def busy_seconds(self) -> float:
        """Time in which the stages of this rank worked."""
        return sum(event.ended - event.started for event in self) / 1e9

    @property
    def waiting_seconds(self) -> float:
        """Time in which this rank waited for an input, and at the end for its messages to be taken."""
        events = list(self)
        last = max(0, self.finished - events[-1].ended) if events and self.finished else 0
        return (sum(event.started - event.asked for event in events) + last) / 1e9

    def recent(self, count: int = 20) -> list[str]:
        """The last actions as text, the one that is going on last, for an error message."""
        lines = []
        for index in range(max(0, self._position + 1 - count), self._position + 1):
            asked, started, ended = self._asked[index], self._started[index], self._ended[index]
            if ended:
                what = f"waited {_ms(started - asked)}, took {_ms(ended - started)}"
            elif started:
                what = f"working since {_ms(clock() - started)}"
            else:
                what = f"waiting since {_ms(clock() - asked)}"
            lines.append(f"{self.actions[index]}: {what}")
        return lines


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"
