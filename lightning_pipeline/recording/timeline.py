"""What did happen: when actions asked, started and ended, and messages too while they are recorded."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from typing_extensions import override

from lightning_pipeline.recording.clock import Mark, StreamClock, now
from lightning_pipeline.schedules import Action

clock = now


class Event(NamedTuple):
    """One action of a run. Times are nanoseconds of this machine's monotonic clock.

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


class Recording:
    """One run of one rank. It stays as it is when the next run begins: keep it as long as you like.

    Iterating gives an `Event` per action that has ended, in order. With a stream's clock that, and asking
    for `began` and `finished`, waits until the stream has come so far; `settled` tells whether it has.

    Args:
        number: Runs of the rank before this one.
        actions: Of the run.
        stream: The clock of the device, `None` where the host works itself.
    """

    def __init__(self, number: int, actions: Sequence[Action], stream: StreamClock | None = None) -> None:
        self.number, self.actions = number, actions
        self.position = -1
        count = len(actions)
        self.asked, self.started, self.ended = [0] * count, [0] * count, [0] * count
        self.bounds = [0, 0]
        self.stream = stream
        self.marks: list[Mark] = []

    @property
    def began(self) -> int:
        """When the run began."""
        self._settle()
        return self.bounds[0]

    @property
    def finished(self) -> int:
        """When all messages of the run were delivered; 0 before that."""
        self._settle()
        return self.bounds[1]

    @property
    def settled(self) -> bool:
        """Whether the times can be read without waiting for the device."""
        return self.stream is None or not self.marks or self.stream.reached(self.marks[-1])

    def __iter__(self) -> Iterator[Event]:
        self._settle()
        for index in range(self.position + 1):
            if self.ended[index]:
                yield Event(self.actions[index], self.asked[index], self.started[index], self.ended[index])

    def _settle(self) -> None:
        """Replace the times at which the host gave the work out by those at which the device did it."""
        if self.stream is None or not self.marks or not self.bounds[1]:
            return
        first, *times, last = self._read_marks(self.stream)
        self.asked, self.started, self.ended = times[::3], times[1::3], times[2::3]
        self.bounds = [first, last]

    def _read_marks(self, stream: StreamClock) -> list[int]:
        times = stream.read(self.marks)
        stream.reuse(self.marks)
        self.marks = []
        return times


class OpenRecording(Recording):
    """A run whose actions are known only as they come, such as those of a step on one device.

    Args:
        number: Runs of the rank before this one.
        stream: The clock of the device, `None` where the host works itself.
    """

    def __init__(self, number: int, stream: StreamClock | None = None) -> None:
        super().__init__(number, (), stream)
        self._actions: list[Action] = []
        self.actions = self._actions

    def start(self, action: Action) -> None:
        """An action begins; nothing was waited for."""
        self._actions.append(action)
        self.position += 1
        for times in (self.asked, self.started):
            times.append(self._moment())
        self.ended.append(0)
        self.bounds[0] = self.bounds[0] or self.started[0]

    def end(self) -> None:
        """The action is over, and the run too if no other follows."""
        self.ended[-1] = self.bounds[1] = self._moment()

    def extend(self) -> None:
        """The last action went on until now."""
        if self.stream is not None:
            del self.marks[-1]
        self.end()

    def drop(self) -> None:
        """The action that began last was none."""
        for times in (self._actions, self.asked, self.started, self.ended):
            del times[-1]
        self.position -= 1
        if self.stream is not None:
            del self.marks[-2:]

    @property
    def is_open(self) -> bool:
        """Whether an action has begun that is not over."""
        return bool(self.ended) and not self.ended[-1]

    def _moment(self) -> int:
        if self.stream is not None:
            self.marks.append(self.stream.mark())
        return clock()

    @override
    def _settle(self) -> None:
        if self.stream is None or not self.marks or self.is_open:
            return
        times = self._read_marks(self.stream)
        self.asked, self.started, self.ended = times[::3], times[1::3], times[2::3]
        self.bounds = [times[0], times[-1]]


class Timeline:
    """Records the actions of one run after the other; about a microsecond per action on the host.

    Iterating gives an `Event` per action of the last run that has ended, in order. On a device events are
    recorded only while somebody watches: without, times are those at which the host gave the work out.

    Args:
        stream: The clock of the device that works, `None` where the host works itself.
    """

    def __init__(self, stream: StreamClock | None = None) -> None:
        self.last = Recording(-1, ())
        """The newest run; a new object for each."""
        self.stream = stream
        self._watchers: list[object] = []

    def watch(self) -> Callable[[], None]:
        """From the next run on the times are the device's. Gives what ends that."""
        one = object()
        self._watchers.append(one)
        return lambda: self._watchers.remove(one) if one in self._watchers else None

    @property
    def _watched(self) -> StreamClock | None:
        return self.stream if self._watchers else None

    @property
    def work(self) -> Recording:
        """The last run, if its times are those of who worked; else one without actions."""
        return self.last if self.stream is None or self.last.stream is not None else Recording(-1, ())

    def begin(self, actions: Sequence[Action]) -> None:
        """Start a new recording."""
        run = self.last = Recording(self.last.number + 1, actions, self._watched)
        run.bounds[0] = clock()
        if run.stream is not None:
            run.marks.append(run.stream.mark())

    def begin_open(self) -> OpenRecording:
        """Start a new recording of actions that are not known beforehand."""
        recording = OpenRecording(self.last.number + 1, self._watched)
        self.last = recording
        return recording

    def ask(self, position: int) -> None:
        """The rank turns to the action at this position."""
        run = self.last
        run.position = position
        run.asked[position] = clock()
        if run.stream is not None:
            run.marks.append(run.stream.mark())

    def start(self) -> None:
        """The input is there."""
        run = self.last
        run.started[run.position] = clock()
        if run.stream is not None:
            run.marks.append(run.stream.mark())

    def end(self) -> None:
        """The stage has finished."""
        run = self.last
        run.ended[run.position] = clock()
        if run.stream is not None:
            run.marks.append(run.stream.mark())

    def finish(self) -> None:
        """All messages of the run are delivered."""
        run = self.last
        if run.stream is not None:
            run.marks.append(run.stream.mark())
        run.bounds[1] = clock()

    def mark(self) -> Mark:
        """This moment, on the clock of the device where somebody watches one; `read` says when it was."""
        return clock() if self._watched is None else self._watched.mark()

    def read(self, marks: Sequence[Mark]) -> list[int]:
        """Times of marks in nanoseconds of the host's clock. Waits for the device."""
        of_device = [mark for mark in marks if not isinstance(mark, int)]
        if self.stream is None or not of_device:
            return list(marks)
        times = iter(self.stream.read(of_device))
        return [mark if isinstance(mark, int) else next(times) for mark in marks]

    def anchor(self) -> None:
        """Tie the times of the device to the host's anew; waits for the device."""
        if self.stream is not None:
            self.stream.anchor()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.last)

    @property
    def actions(self) -> Sequence[Action]:
        """Of the last run."""
        return self.last.actions

    @property
    def began(self) -> int:
        """When the last run began."""
        return self.last.began

    @property
    def finished(self) -> int:
        """When the last run was over; 0 before that."""
        return self.last.finished

    @property
    def current(self) -> Action | None:
        """The action that the rank is at, None before the first."""
        run = self.last
        return run.actions[run.position] if run.position >= 0 else None

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
        """The last actions as text, the one that is going on last, for an error message: the host's times."""
        lines, run = [], self.last
        for index in range(max(0, run.position + 1 - count), run.position + 1):
            asked, started, ended = run.asked[index], run.started[index], run.ended[index]
            if ended:
                what = f"waited {_ms(started - asked)}, took {_ms(ended - started)}"
            elif started:
                what = f"working since {_ms(clock() - started)}"
            else:
                what = f"waiting since {_ms(clock() - asked)}"
            lines.append(f"{run.actions[index]}: {what}")
        return lines


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"


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
