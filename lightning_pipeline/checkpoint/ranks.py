"""All ranks of a save or load do a step together: it went well on all of them, or it fails on all of them."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_pipeline import errors
from lightning_pipeline.errors import CheckpointError, CheckpointWriteError

T = TypeVar("T")
_GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class Failed:
    """What went wrong on a rank, as text: not every exception can be pickled."""

    kind: str
    text: str
    detail: str
    rank: int

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failed":
        """Describe an exception."""
        own = isinstance(error, CheckpointError)
        text = str(error) if own else f"{type(error).__name__}: {error}"
        return cls(type(error).__name__, text, "".join(traceback.format_exception(error)), rank)


class Ranks:
    """The ranks that save or load together.

    Args:
        group: Over all of them, used by nothing else meanwhile; gloo. `None` where there is one rank.
        store: Where each rank notes how far it has come, so that a missing one can be named.
        rank: This rank's number in the group; 0 leads.
        timeout: Longest wait for the others in one step.
        name: Of the run, different for each.
    """

    def __init__(
        self, group: Any, store: Store | None, rank: int, timeout: timedelta, name: str = "checkpoint"
    ) -> None:
        self.group, self.rank = group, rank
        self._store, self._timeout, self._name = store, timeout, name
        self._steps = 0
        self.size = group.size() if group is not None else 1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides and commits."""
        return self.rank == 0

    def collect(
        self, what: str, local: Callable[[], T], lead: Callable[[list[T]], Any], *, scatter: bool = False
    ) -> Any:
        """Every rank works something out; the leader makes one result of it, for all.

        Args:
            what: For messages: `writing`.
            local: On every rank, without communication.
            lead: On the leader, with what `local` gave on each rank.
            scatter: Whether the result is a list with one entry for each rank.

        Raises:
            CheckpointError: Something raised on any rank; the same on all. Exceptions that are no
                `CheckpointError` become a `CheckpointWriteError`.
        """
        done, interrupt = self._try(local)
        results = self._talk(what, lambda: self._gather(done))
        outcome: Any = None
        if self.leads:
            failed = [result for result in results if isinstance(result, Failed)]
            outcome = failed or self._try(lambda: lead(results))[0]
        outcome = self._talk(what, lambda: self._hand_out(outcome, scatter))
        if interrupt is not None:
            raise interrupt
        if isinstance(outcome, Failed):
            outcome = [outcome]
        if isinstance(outcome, list) and outcome and isinstance(outcome[0], Failed):
            self._raise(what, outcome)
        return outcome

    def everyone(self, what: str, local: Callable[[], T]) -> list[T]:
        """Every rank works something out and gets what all of them have."""
        found: list[T] = self.collect(what, local, lambda results: results)
        return found

    def everyone_local(self, what: str, local: Callable[[], T]) -> T:
        """Every rank works something out and keeps it; all raise when one does."""
        kept: list[T] = []
        self.collect(what, lambda: kept.append(local()), lambda _: None)
        return kept[0]

    def leader(self, what: str, lead: Callable[[], T]) -> T:
        """The leader works something out for all."""
        found: T = self.collect(what, lambda: None, lambda _: lead())
        return found

    def _try(self, work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        try:
            return work(), None
        except (KeyboardInterrupt, SystemExit) as error:
            return Failed.of(error, self.rank), error
        except BaseException as error:  # DCP's exceptions are no `Exception`
            return Failed.of(error, self.rank), None

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(value, found, group=self.group, group_dst=0)
        return found or []

    def _hand_out(self, value: Any, scatter: bool) -> Any:
        if self.group is None:
            return value[0] if scatter and isinstance(value, list) else value
        if not scatter:
            box = [value]
            dist.broadcast_object_list(box, group=self.group, group_src=0)
            return box[0]
        failed = isinstance(value, Failed) or (
            isinstance(value, list) and any(isinstance(v, Failed) for v in value)
        )
        own: list[Any] = [None]
        given = [value] * self.size if failed else value
        dist.scatter_object_list(own, given if self.leads else None, group=self.group, group_src=0)
        return own[0]

    def _raise(self, what: str, failed: list[Failed]) -> None:
        first = failed[0]
        kind = getattr(errors, first.kind, CheckpointWriteError)
        if not issubclass(kind, CheckpointError):
            kind = CheckpointWriteError
        others = "".join(f"; rank {f.rank}: {f.text}" for f in failed[1:] if f.text != first.text)
        error = kind(f"{what} failed on global rank {first.rank}: {first.text}{others}")
        error.add_note(f"On global rank {first.rank}:\n{first.detail}")
        raise error

    # A rank that does not come

    def _talk(self, what: str, exchange: Callable[[], Any]) -> Any:
        """Communicate; a rank that is gone or stuck is named, and all others are freed."""
        if self.group is None and self.size > 1:
            raise CheckpointWriteError(
                f"{what} failed: an earlier save or load lost a rank; start the run again"
            )
        self._steps += 1
        self._note(f"{self._name}/{self._steps}/{self.rank}", "here")
        try:
            return exchange()
        except RuntimeError as error:
            cause = self._cause(what, error)
            if self.group is not None:
                group, self.group = self.group, None
                dist.destroy_process_group(group)  # the others see a closed connection
                del group
            raise CheckpointWriteError(cause) from error

    def _cause(self, what: str, error: RuntimeError) -> str:
        deadline = time.monotonic() + _GRACE_SECONDS
        missing = self._missing()
        while missing and time.monotonic() < deadline and not self._known():
            time.sleep(0.01)
            missing = self._missing()
        told = self._known()
        if told:
            return told
        names = ", ".join(map(str, missing)) or "0, which hosts the store, or another"
        own = (
            f"{what} failed: global rank {names} did not answer, ended or stuck "
            f"(checkpoint_timeout={self._timeout.total_seconds():g} s; seen from rank {self.rank}: {error})"
        )
        self._note(f"{self._name}/cause", own)
        return own

    def _missing(self) -> list[int]:
        try:
            assert self._store is not None
            keys = [f"{self._name}/{self._steps}/{rank}" for rank in range(self.size)]
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except (RuntimeError, AssertionError):  # the store's host is gone
            return []

    def _known(self) -> str:
        try:
            key = f"{self._name}/cause"
            return (
                self._store.get(key).decode() if self._store is not None and self._store.check([key]) else ""
            )
        except RuntimeError:  # the store's host is gone
            return ""

    def _note(self, key: str, value: str) -> None:
        if self._store is None:
            return
        try:
            self._store.set(key, value)
        except RuntimeError:  # the store's host is gone: the exchange itself will tell
            return
