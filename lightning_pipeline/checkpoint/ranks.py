"""All ranks of a save or load do a step together: it went well on all of them, or it fails on all of them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from lightning_pipeline import errors
from lightning_pipeline._torch import disable_current_modes, set_group_timeout
from lightning_pipeline.errors import CheckpointError, CheckpointWriteError
from lightning_pipeline.ranks import CAUSE, Cause, Company, Failed, Lookout, Notes, break_off, closed_peers
from lightning_pipeline.wire import Wait, Waits

T = TypeVar("T")
_GRACE_SECONDS = 1.0


class Ranks(Company):
    """The ranks that save or load together. Exceptions of a rank become a `CheckpointError` on all.

    Args:
        group: Over all of them, used by nothing else meanwhile; gloo. `None` where there is one rank.
        store: Where a lost rank is named, where there is no `lookout`.
        rank: This rank's number in the group; 0 leads.
        timeout: Longest wait for the others in one step.
        name: Of the run, different for each.
        lookout: Of the run. Default: one of its own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        store: Store | None,
        rank: int,
        timeout: timedelta,
        name: str = "checkpoint",
        lookout: Lookout | None = None,
    ) -> None:
        super().__init__(group, None, rank)
        if self.group is not None:
            set_group_timeout(2 * timeout + timedelta(seconds=60), self.group)  # the lookout is sooner
        self.size, self._timeout = len(self.ranks), timeout
        self._key = f"{name}/cause"
        self._lookout = lookout
        self._own: Lookout | None = None
        if lookout is None and self.group is not None and store is not None:
            self._lookout = self._own = Lookout(
                Notes(store), Waits(), rank=rank, size=self.size, pipeline_rank=lambda rank: rank,
                step_timeout=timeout, hook_timeout=timeout,
            )  # fmt: skip
            self._own.start()

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides and commits."""
        return self.rank == 0

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

    def leave(self) -> None:
        """End the group; the others see a closed connection."""
        group, self.group = self.group, None
        if self._own is not None:
            self._own.stop()
        if group is not None:
            dist.destroy_process_group(group)

    @override
    def refuse(self, what: str, failed: Sequence[Failed]) -> NoReturn:
        first = failed[0]
        kind = getattr(errors, first.kind, CheckpointWriteError)
        if not issubclass(kind, CheckpointError):
            kind = CheckpointWriteError if what.startswith("saving") else CheckpointError
        texts = [entry.text.removeprefix(f"{errors.__name__}.{entry.kind}: ") for entry in failed]
        others = "".join(
            f"; rank {entry.rank}: {text}"
            for entry, text in zip(failed, texts, strict=True)
            if text != texts[0]
        )
        error = kind(f"{what} failed on global rank {first.rank}: {texts[0]}{others}")
        error.add_note(f"On global rank {first.rank}:\n{first.detail}")
        raise error

    # A rank that does not come

    @override
    @contextmanager
    def exchange(self, what: str, group: dist.ProcessGroup | None = None) -> Iterator[dist.ProcessGroup]:
        """Communicate in the block; a rank that is gone or stuck is named, and all others are freed."""
        group = self.group
        if group is None:
            raise CheckpointWriteError(
                f"{what} failed: an earlier save or load lost a rank; start the run again"
            )
        wait = Wait(what, tuple(self.ranks), group, self._timeout.total_seconds(), self._key)
        try:
            inside = nullcontext() if self._lookout is None else self._lookout.waits.inside(wait)
            with inside, disable_current_modes():  # a module may be under construction
                yield group
        except RuntimeError as error:
            cause = self._cause(what, error, group)
            break_off(group)
            self.leave()
            raise CheckpointWriteError(cause) from error

    def _cause(self, what: str, error: RuntimeError, group: dist.ProcessGroup) -> str:
        told = self._told()
        if told is not None:
            who = f"global rank {told.global_rank} did not answer, ended or stuck"
            why = f"{told.where}: {told.summary}"
        else:
            closed = closed_peers(group)
            names = ", ".join(map(str, closed)) or "0, which hosts the store, or another,"
            who, why = f"global rank {names} did not answer, ended or stuck", f"{error}"
            if closed and self._lookout is not None:
                own = Cause(closed[0], closed[0], "an unknown action", f"its connections closed: {why}", "")
                self._lookout.notes.put_first(self._key, own.to_text())
        limit = f"checkpoint_timeout={self._timeout.total_seconds():g} s"
        return f"{what} failed: {who} ({limit}; seen from rank {self.rank}: {why})"

    def _told(self) -> Cause | None:
        """What ended the wait, here or elsewhere; one who failed gets a moment to say so."""
        lookout = self._lookout
        if lookout is None:
            return None
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            for key in (self._key, CAUSE):
                text = "" if key in lookout.decided else lookout.notes.get(key)
                if text or key in lookout.decided:
                    return Cause.from_text(text) if text else lookout.decided[key]
            if lookout.notes.is_gone or time.monotonic() > deadline:
                return None
            time.sleep(0.02)
