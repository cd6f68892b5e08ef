"""One first cause for all ranks: written to the store before any connection is closed, read by everyone."""

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from torch.distributed.distributed_c10d import Store

from lightning_pipeline.errors import StageFailedError, StageTimeoutError
from lightning_pipeline.ranks.groups import CAUSE, Groups
from lightning_pipeline.wire import LinkError

_LOST = ("Connection closed by peer", "Connection reset", "Broken pipe", "imed out waiting")
_LINGER_SECONDS = 2.0
_COLLECT_SECONDS = 0.5


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
        timed_out: Whether a wait took longer than `step_timeout`.
        silent: Whether that rank cannot tell anything itself any more.
        advice: What more there is to say, such as what to change.
    """

    rank: int
    global_rank: int
    where: str
    summary: str
    detail: str
    timed_out: bool = False
    silent: bool = False
    advice: str = ""


class Failure:
    """Ends all ranks of a pipeline with the first cause.

    Args:
        groups: Whose connections are closed, and whose store is used.
        recent: Gives this rank's last actions as lines of text.

    Attributes:
        explain: Gives what more there is to say about an error of this rank, often nothing.
    """

    def __init__(self, groups: Groups, *, recent: Callable[[], list[str]] = list) -> None:
        self._groups = groups
        self._store = groups.store
        self._recent = recent
        self.cause: Cause | None = None
        self._raised: BaseException | None = None
        self.explain: Callable[[BaseException, Where], str] = lambda error, where: ""

    @contextmanager
    def watch(self, activity: str) -> Iterator[None]:
        """Treat any exception of the block as a failure of this rank.

        Args:
            activity: What the block does, for the message: "averaging gradients".

        Raises:
            BaseException: What this rank ended with, when it goes on to ask the others all the same.
        """
        if self._raised is not None:
            raise self._raised
        try:
            yield
        except BaseException as error:
            self.end(error, Where(activity))
            raise

    def end(self, error: BaseException, where: Where) -> None:
        """Make the cause known, close all connections, and raise it where this rank is not its origin.

        Returns only when `error` itself is the first cause: raise it then.

        Raises:
            StageFailedError: Another rank failed first.
            StageTimeoutError: The first cause is a wait that was too long.
        """
        if self.cause is not None or isinstance(error, StageFailedError):
            return
        if not isinstance(error, LinkError) and any(text in str(error) for text in _LOST):
            self._await_cause()
        own = self._describe(error, where)
        self.cause, self._raised = self._first(own), error
        self._groups.abort()
        self._linger(self.cause)
        if self.cause == own and not isinstance(error, LinkError):
            if own.advice:
                error.add_note(own.advice)
            error.add_note(f"This was {_named(own)} in {own.where}; all other ranks were told.")
            return
        self._raise(self.cause, where, error)

    def _await_cause(self) -> None:
        """A collective that broke cannot name who is gone; give those who can a moment to do so."""
        deadline = time.monotonic() + _COLLECT_SECONDS
        while time.monotonic() < deadline and self._ask_store(lambda store: store.check([CAUSE])) == "":
            time.sleep(0.01)

    def _describe(self, error: BaseException, where: Where) -> Cause:
        rank, number = self._groups.rank, self._groups.global_rank
        if isinstance(error, LinkError):
            return self._describe_lost(error, where)
        summary = "".join(traceback.format_exception_only(error)).strip()
        detail = "".join(traceback.format_exception(error))
        return Cause(rank, number, str(where), summary, detail, advice=self._explained(error, where))

    def _explained(self, error: BaseException, where: Where) -> str:
        try:
            return self.explain(error, where)
        except Exception as broken:  # the first cause is what counts
            return f"What more there is to say could not be put together: {type(broken).__name__}: {broken}"

    def _describe_lost(self, error: LinkError, where: Where) -> Cause:
        groups = self._groups
        culprit = self._culprit(error.peer) if error.timed_out else error.peer
        if error.timed_out:
            doing = "an action that takes too long"
            summary = (
                f"rank {groups.rank} waited {groups.step_timeout.total_seconds():g} s in {where} for rank "
                f"{error.peer}; rank {culprit} is the one that waits for nobody"
            )
        else:
            doing = f"an unknown action; rank {groups.rank} was in {where}"
            summary = f"its process ended without saying why (killed, or out of memory?): {error}"
        return Cause(
            rank=culprit,
            global_rank=groups.numbering.global_rank(culprit, groups.replica),
            where=doing,
            summary=summary,
            detail=f"Last actions of rank {groups.rank}:\n  " + "\n  ".join(self._recent()),
            timed_out=error.timed_out,
            silent=True,
        )

    def _culprit(self, peer: int) -> int:
        """Follow who waits for whom to the rank that does not wait: it is stopped or at work."""
        prefix = f"waiting/{self._groups.replica}"
        self._ask_store(lambda store: store.set(f"{prefix}/{self._groups.rank}", str(peer)))
        deadline = time.monotonic() + _COLLECT_SECONDS
        seen = {self._groups.rank}
        while peer not in seen and time.monotonic() < deadline:
            key = f"{prefix}/{peer}"
            if self._ask_store(lambda store, key=key: store.check([key])):  # type: ignore[misc]
                seen.add(peer)
                peer = int(self._ask_store(lambda store, key=key: store.get(key)) or peer)  # type: ignore[misc]
            else:
                time.sleep(0.02)
        return peer

    def _first(self, own: Cause) -> Cause:
        """Write our cause unless there is one; either way return the one that stands."""
        text = json.dumps(asdict(own))
        stored = self._ask_store(lambda store: store.compare_set(CAUSE, "", text))
        if stored:
            return Cause(**json.loads(stored))
        if not own.silent or self._groups.global_rank == 0:
            return own
        rank, *_ = self._groups.numbering.coordinates(0)
        summary = f"it hosts the store, which is gone; see its own output. Seen from here: {own.summary}"
        return replace(own, rank=rank, global_rank=0, summary=summary)

    def _ask_store(self, ask: Callable[[Store], object]) -> str:
        """Ask the store; an empty answer when its host is gone."""
        try:
            answer = ask(self._store)
        except RuntimeError:  # the store's host has ended: each rank then reports what it saw itself
            return ""
        return answer.decode() if isinstance(answer, bytes) else str(answer or "")

    def _linger(self, cause: Cause) -> None:
        """Let the others read the cause before the process that may host the store ends."""
        read = int(self._ask_store(lambda store: store.add("read", 1)) or 0)
        if self._groups.global_rank != 0:
            return
        deadline = time.monotonic() + _LINGER_SECONDS
        readers = self._groups.numbering.world_size - cause.silent
        while 0 < read < readers and time.monotonic() < deadline:
            time.sleep(0.005)
            read = int(self._ask_store(lambda store: store.add("read", 0)) or 0)

    def _raise(self, cause: Cause, where: Where, error: BaseException) -> NoReturn:
        kind = StageTimeoutError if cause.timed_out else StageFailedError
        what = "is stuck" if cause.timed_out else "failed"
        self._raised = kind(
            f"pipeline rank {self._groups.rank} stopped in {where} because {_named(cause)} {what} in "
            f"{cause.where}: {cause.summary}\n{cause.detail}{cause.advice}"
        )
        raise self._raised from error


def _named(cause: Cause) -> str:
    return f"pipeline rank {cause.rank} (global rank {cause.global_rank})"
