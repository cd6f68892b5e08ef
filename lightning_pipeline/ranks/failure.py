"""One first cause for all ranks: written to the notes before any connection is closed, read by everyone."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch.distributed as dist

from lightning_pipeline.errors import StageFailedError, StageTimeoutError
from lightning_pipeline.ranks.cause import Cause, Where, summary_of
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.ranks.lookout import closed_peers
from lightning_pipeline.ranks.notes import CAUSE, Notes
from lightning_pipeline.wire import LinkError, Wait

_LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "imed out waiting",
    "caused pair closure",
)
_LINGER_SECONDS = 2.0
_COLLECT_SECONDS = 0.5
_PATIENCE_SECONDS = 0.5  # for ranks that raise the same a little later; others are told after that
_NAP = 0.005
_VERDICT = "ends/verdict"


_OUTSIDE = Where("code outside a step")


def is_lost(error: BaseException) -> bool:
    """Whether a collective says that a connection is gone, or its time over."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)


class Failure:
    """Ends all ranks of a pipeline with the first cause.

    Args:
        groups: Whose connections are closed, and whose notes is used.
        asked: What a rank that was asked to end raises, such as after SIGTERM: all ranks raise it then.

    Attributes:
        explain: Gives what more there is to say about an error of this rank, often nothing.
        report: Told the first cause, once all connections are closed; gives a sentence for the message.
        cause: The first cause, once there is one.
    """

    def __init__(self, groups: Groups, *, asked: type[BaseException] | None = None) -> None:
        self._groups = groups
        self._notes, self._asked = groups.notes, asked
        self.cause: Cause | None = None
        self._raised: BaseException | None = None
        self.explain: Callable[[BaseException, Where], str] = lambda error, where: ""
        self.report: Callable[[Cause], str] = lambda cause: ""
        self._reported = ""

    @contextmanager
    def watch(self, activity: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Treat any exception of the block as a failure of this rank.

        Args:
            activity: What the block does, for the message: "averaging gradients".
            group: Whose ranks the block waits for.

        Raises:
            BaseException: What this rank ended with, when it goes on to ask the others all the same.
        """
        self.go_on(activity)
        try:
            if group is None:
                yield
            else:
                with self._groups.waits.inside(
                    Wait(activity, tuple(dist.get_process_group_ranks(group)), group)
                ):
                    yield
        except BaseException as error:
            self.end(error, Where(activity), group)
            raise

    def end(
        self, error: BaseException, where: Where = _OUTSIDE, group: dist.ProcessGroup | None = None
    ) -> None:
        """Make the cause known, close all connections, and raise it where this rank is not its origin.

        Returns only when `error` itself is the first cause: raise it then.

        Args:
            error: What was raised on this rank.
            where: What this rank was doing.
            group: In which it waited.

        Raises:
            StageFailedError: Another rank failed first.
            StageTimeoutError: The first cause is a wait that was too long.
        """
        if self.cause is not None or isinstance(error, StageFailedError):
            return
        decided = self._groups.lookout.decided.get(CAUSE)
        own = decided or self._own(error, where, group)
        self.cause, self._raised = decided or self._first(own), error
        gone = closed_peers(self._groups.control) if not self._groups.aborted else []
        self._groups.abort()
        if not isinstance(error, KeyboardInterrupt | SystemExit) and not self.cause.asked:
            self._reported = self.report(self.cause)
        self._linger(self.cause, len(gone))
        mine = self.cause == own and own.global_rank == self._groups.global_rank
        if mine and not own.silent and not own.timed_out:
            if own.advice:
                error.add_note(own.advice)
            error.add_note(f"This was {own.who} in {own.where}; all other ranks were told.")
            if self._reported:
                error.add_note(self._reported)
            return
        self.tell(where, error)

    def write_down(self, error: BaseException) -> None:
        """Report what every rank raises by itself, so that nobody is told."""
        error.add_note(self.report(self._own(error, _OUTSIDE, None)))

    def go_on(self, activity: str) -> None:
        """Raise what this rank or the run has ended with, if it has.

        Args:
            activity: What this rank would do next.
        """
        if self._raised is not None:
            raise self._raised
        if self.cause is not None:
            self.tell(Where(activity))

    def missed(self, activity: str) -> None:
        """Not all ranks came to the end of something: raise what one of them failed with, if one did.

        Args:
            activity: That the others have come to.

        Raises:
            StageFailedError: A rank failed on its way.
        """
        decided = self._groups.lookout.decided.get(CAUSE)
        text = self._notes.get(CAUSE)
        if (text or decided) and self.cause is None:
            self.cause = Cause.from_text(text) if text else decided
            self.tell(Where(activity))

    def tell(self, where: Where, error: BaseException | None = None) -> NoReturn:
        """Raise the first cause on a rank that is not its origin."""
        cause = self.cause
        assert cause is not None, "there is a cause"
        if cause.asked and self._asked is not None:
            self._raised = self._asked()
            raise self._raised from error
        kind = StageTimeoutError if cause.timed_out else StageFailedError
        what = "is stuck" if cause.timed_out else "failed"
        self._raised = kind(
            f"pipeline rank {self._groups.rank} stopped in {where} because {cause.who} {what} in "
            f"{cause.where}: {cause.summary}\n{cause.detail}{cause.advice}"
            + (f"\n{self._reported}" if self._reported else "")
        )
        raise self._raised from error

    def _own(self, error: BaseException, where: Where, group: dist.ProcessGroup | None) -> Cause:
        """The cause as this rank sees it."""
        if isinstance(error, LinkError):
            peer = self._groups.numbering.global_rank(error.peer, self._groups.replica)
            return self._lost(error, where, peer)
        if group is not None and is_lost(error):
            told = self._await_cause()
            if told is not None:
                return told
            closed = closed_peers(group)
            if closed:
                return self._lost(error, where, closed[0])
        summary, detail = summary_of(error), "".join(traceback.format_exception(error))
        groups = self._groups
        return Cause(
            groups.rank, groups.global_rank, str(where), summary, detail,
            advice=self._explained(error, where),
            asked=self._asked is not None and isinstance(error, self._asked),
        )  # fmt: skip

    def _await_cause(self) -> Cause | None:
        """A collective that broke cannot name who is gone; give those who can a moment to do so."""
        deadline = time.monotonic() + _COLLECT_SECONDS
        text = self._notes.get(CAUSE)
        while not text and not self._notes.is_gone and time.monotonic() < deadline:
            time.sleep(0.01)
            text = self._notes.get(CAUSE)
        return Cause.from_text(text) if text else None

    def _explained(self, error: BaseException, where: Where) -> str:
        try:
            return self.explain(error, where)
        except Exception as broken:  # the first cause is what counts
            return f"What more there is to say could not be put together: {type(broken).__name__}: {broken}"

    def _lost(self, error: BaseException, where: Where, peer: int) -> Cause:
        """A rank that closed its connections without leaving a cause."""
        groups = self._groups
        rank, _ = groups.numbering.coordinates(peer)
        return Cause(
            rank=rank,
            global_rank=peer,
            where=f"an unknown action; rank {groups.rank} was in {where}",
            summary=f"its process ended without saying why (killed, or out of memory?): {error}",
            detail=f"Last actions of rank {groups.rank}:\n  " + "\n  ".join(groups.lookout.recent()),
            timed_out=isinstance(error, LinkError) and error.timed_out,
            silent=True,
        )

    def _first(self, own: Cause) -> Cause:
        """Write our cause unless there is one; either way return the one that stands."""
        stands = self._notes.put_first(CAUSE, own.to_text())
        if stands:
            return Cause.from_text(stands)
        if not own.silent or self._groups.host in (None, self._groups.global_rank):
            return own
        rank, _ = self._groups.numbering.coordinates(self._groups.host)
        summary = f"it hosts the store, which is gone; see its own output. Seen from here: {own.summary}"
        return replace(own, rank=rank, global_rank=self._groups.host, summary=summary)

    def _linger(self, cause: Cause, gone: int) -> None:
        """Let the others read the cause before the process that may host the store ends.

        Args:
            cause: The first.
            gone: Ranks whose connections are closed: dead, or about to read.
        """
        read = self._notes.add("read", 1)
        if self._groups.global_rank != 0:
            return
        begin = time.monotonic()
        size = self._groups.numbering.world_size
        while 0 < read < size - cause.silent and time.monotonic() < begin + _LINGER_SECONDS:
            if read >= size - gone and time.monotonic() > begin + _COLLECT_SECONDS:
                break
            time.sleep(0.005)
            read = self._notes.add("read", 0)


def all_end_alike(notes: Notes, rank: int, size: int, place: str) -> bool:
    """Whether all ranks have raised at one place. All that ask get the same answer.

    Args:
        notes: Of the run.
        rank: This global rank.
        size: Of the world.
        place: What was raised and where, in words.
    """
    keys = [f"ends/{number}" for number in range(size)]
    notes.put(keys[rank], place)
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        found = notes.get_all([*keys, CAUSE, _VERDICT])
        if _VERDICT in found:
            return found[_VERDICT] == "alike"
        places = [found[key] for key in keys if key in found]
        if len(places) == size or CAUSE in found or len(set(places)) > 1 or time.monotonic() > until:
            alike = places == [place] * size and CAUSE not in found
            return notes.put_first(_VERDICT, "alike" if alike else "apart") == "alike"
        time.sleep(_NAP)
