"""A thread of each rank that says what the rank waits for, and ends waits that nobody will end.

Every rank leaves a sign of life on the notes several times a `step_timeout`, with what it waits for. Who
has waited long looks at the ranks it waits for, at those they wait for, and so on:

* one gives no sign of life: it is stopped, cut off, or holds Python's lock. Its time is `step_timeout`.
* all of them wait: for each other. Their time is `step_timeout`.
* one waits for nobody: it is alive inside the user's own code, which may upload or compile. That is said
  after `step_timeout`, and its time is `hook_timeout`.

Then the cause goes to the notes, for all ranks, and the wait ends with an exception.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipeline.ranks.cause import Cause
from lightning_pipeline.ranks.notes import CAUSE, Notes
from lightning_pipeline.wire import Wait, Waits

_LOG = logging.getLogger("lightning_pipeline")  # a warning could raise, and end the thread
_BEATS = 16  # signs of life in a step_timeout, but at least one a second
_SILENT = 0.4  # of step_timeout without a sign of life


@dataclass
class _Seen:
    """The last sign of life of a rank, and when it changed as seen from here."""

    text: str = ""
    changed: float = field(default_factory=time.monotonic)
    state: Mapping[str, Any] = field(default_factory=dict)


class Lookout:
    """Watches over the waits of one rank.

    Args:
        notes: Of the run.
        waits: Of this rank.
        rank: This global rank.
        size: Of the world.
        pipeline_rank: Of a global rank.
        step_timeout: For ranks that are stopped or wait for each other.
        hook_timeout: For ranks that are alive inside the user's own code.
        host: Global rank that hosts the store; `None`: another process does.

    Attributes:
        doing: Tells where this rank is while it waits for nobody.
        recent: Gives this rank's last actions as lines of text.
        decided: What ended a wait of this rank, by the key of the wait.
        groups: Of the run. Those of devices are aborted when a rank is lost: a host that waits for its
            device, anywhere in the user's code, is not seen to wait.
    """

    def __init__(
        self,
        notes: Notes,
        waits: Waits,
        *,
        rank: int,
        size: int,
        pipeline_rank: Callable[[int], int],
        step_timeout: timedelta,
        hook_timeout: timedelta,
        host: int | None = 0,
    ) -> None:
        self.notes, self.waits, self._rank, self._size = notes, waits, rank, size
        self._pipeline_rank, self._host = pipeline_rank, host
        self.step_timeout, self.hook_timeout = step_timeout.total_seconds(), hook_timeout.total_seconds()
        self.period = min(1.0, self.step_timeout / _BEATS)
        self.doing: Callable[[], str] = lambda: "code outside a step"
        self.recent: Callable[[], list[str]] = list
        self.decided: dict[str, Cause] = {}
        self.groups: list[dist.ProcessGroup] = []
        self._beats = 0
        self._seen: dict[int, _Seen] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_pipeline lookout", daemon=True)

    def start(self) -> None:
        """From now on give signs of life."""
        if self._size > 1:
            self._thread.start()

    def stop(self, *, wait: float = 0.0) -> None:
        """No more.

        Args:
            wait: Seconds for the thread to end; not for ever, since the host of its notes may be silent.
        """
        self._stop.set()
        if wait and self._thread.is_alive():
            self._thread.join(wait)

    def _watch(self) -> None:
        while not self._stop.wait(self.period):
            try:
                self._beat()
            except Exception:  # whatever it is: without this thread nobody would end a wait
                _LOG.exception("the lookout of global rank %s failed, and goes on", self._rank)

    def _beat(self) -> None:
        """Give a sign of life, and look at what this rank waits for."""
        self._beats += 1
        self.notes.put(_key(self._rank), self._state())
        for lane in ("run", "saving"):
            for wait in self.waits.of(lane):
                self._judge(wait, lane)
        if any(map(works_on_device, list(self.groups))):
            self._free_devices()

    def _free_devices(self) -> None:
        """End what devices run once there is a cause, or a rank is silent for longer than it may."""
        told = self.notes.get(CAUSE)
        if not told:
            self._look()
            now = time.monotonic()
            silent = [rank for rank, seen in self._seen.items() if now - seen.changed > self.step_timeout]
            lost = [rank for rank in silent if rank != self._rank]
            if not lost or self.notes.silent_for() > self._silence:
                return
            wait = Wait(self.doing, (lost[0],), None, since=now - self.step_timeout)
            own = self._silent(wait, self.step_timeout, lost[0]).to_text()
            told = self.notes.put_first(CAUSE, own) or own
        self.decided[CAUSE] = Cause.from_text(told)
        abort_devices(self.groups)
        self.groups = []

    def _state(self) -> str:
        """What this rank tells of itself; the number makes every sign of life another."""
        now = time.monotonic()
        lanes = {
            lane: [[wait.text(), list(wait.ranks), wait.number, round(now - wait.since, 2)] for wait in waits]
            for lane in ("run", "saving")
            if (waits := self.waits.of(lane))
        }
        return json.dumps({"beat": self._beats, "doing": self.doing(), **lanes})

    # Judging a wait

    def _judge(self, wait: Wait, lane: str) -> None:
        waited = time.monotonic() - wait.since
        if (wait.group is None and not wait.looks) or waited < self.period:
            return
        if wait.is_over:
            if wait.group is not None:
                _break_off_host(wait.group)  # again, until the wait has seen it
            return
        if wait.group is None and self.notes.is_gone:  # no connection closes that would tell
            self._end(wait, self._silent_host(wait, waited))
            return
        told = self.notes.get(wait.key) or (wait.key != CAUSE and self.notes.get(CAUSE))
        if told:
            self._end(wait, Cause.from_text(told))
        limit = min(self.step_timeout, wait.patience or self.step_timeout)
        if not told and waited >= limit / 2:
            self._look()
            if waited >= limit:
                self._decide(wait, lane, waited)

    def _look(self) -> None:
        """Note which ranks have given a sign of life since the last look."""
        found = self.notes.get_all([_key(rank) for rank in range(self._size)])
        for rank in range(self._size):
            seen = self._seen.setdefault(rank, _Seen())
            text = found.get(_key(rank), "")
            if text and text != seen.text:
                self._seen[rank] = _Seen(text, state=json.loads(text))

    def _decide(self, wait: Wait, lane: str, waited: float) -> None:
        reached = self._reached(wait, lane)
        if self.notes.is_gone or self.notes.silent_for() > self._silence:
            self._end(wait, self._silent_host(wait, waited))
            return
        if not reached:
            return
        now = time.monotonic()
        silent = [rank for rank in reached if now - self._seen[rank].changed > self._silence]
        free = [rank for rank in reached if not self._seen[rank].state.get(lane)]
        if silent:
            self._end(wait, self._silent(wait, waited, silent[0]))
        elif not free:
            self._decide_circle(wait, lane, reached)
        elif waited >= (self.hook_timeout if wait.patience is None else wait.patience):
            self._end(wait, self._stuck(wait, waited, free[0]))
        elif not wait.was_told:
            wait.was_told = True
            self._warn(wait, waited, free[0])

    @property
    def _silence(self) -> float:
        return max(_SILENT * self.step_timeout, 3 * self.period)

    def _reached(self, wait: Wait, lane: str) -> list[int]:
        """Ranks that this one waits for, those that they wait for, and so on; nearest first."""
        reached: list[int] = []
        ahead = [rank for rank in wait.ranks if rank != self._rank]
        while ahead:
            rank = ahead.pop(0)
            if rank in reached or rank == self._rank:
                continue
            reached.append(rank)
            for _, ranks, *_ in self._seen[rank].state.get(lane, ()):
                ahead += ranks
        return reached

    def _decide_circle(self, wait: Wait, lane: str, reached: list[int]) -> None:
        others = {rank: self._seen[rank].state[lane][0] for rank in reached}
        if all(seconds >= self.step_timeout / 2 for *_, seconds in others.values()):
            self._end(wait, self._circle(wait, others))

    # What to say

    def _cause(self, rank: int, where: str, summary: str, advice: str = "", *, silent: bool = True) -> Cause:
        detail = f"Last actions of rank {self._pipeline_rank(self._rank)}:\n  " + "\n  ".join(self.recent())
        return Cause(self._pipeline_rank(rank), rank, where, summary, detail, True, silent, advice)

    def _own(self, wait: Wait, waited: float) -> str:
        allowed = self.step_timeout if waited < self.hook_timeout else self.hook_timeout
        return f"rank {self._pipeline_rank(self._rank)} waited {allowed:g} s in {wait.text()}"

    def _silent(self, wait: Wait, waited: float, rank: int) -> Cause:
        seen = self._seen[rank]
        ago = time.monotonic() - seen.changed
        where = f"{_place(seen.state)}, and gives no sign of life"
        summary = (
            f"{self._own(wait, waited)}; rank {self._pipeline_rank(rank)} has given no sign of life for "
            f"{ago:.1f} s or more: its process is stopped, its machine cut off, or it holds Python's lock"
        )
        return self._cause(rank, where, summary)

    def _silent_host(self, wait: Wait, waited: float) -> Cause:
        own = self._own(wait, waited)
        if self._host is None:
            first = next((rank for rank in wait.ranks if rank != self._rank), self._rank)
            who = "the store of the run, which the launcher's agent hosts, does not answer"
            return self._cause(first, "an unknown action", f"{own}; {who}, so that nobody can say more")
        who = f"the store that global rank {self._host} hosts"
        why = "does not answer: that process is stopped, or its machine is cut off"
        if self.notes.is_gone:
            own, why = f"seen in {wait.text()}", "is gone: that process has ended"
        return self._cause(self._host, "an unknown action, and gives no sign of life", f"{own}; {who} {why}")

    def _stuck(self, wait: Wait, waited: float, rank: int) -> Cause:
        where = f"{_place(self._seen[rank].state)}, which takes too long"
        summary = (
            f"rank {self._pipeline_rank(self._rank)} waited {waited:.0f} s in {wait.text()}; rank "
            f"{self._pipeline_rank(rank)} is the one that waits for nobody"
        )
        advice = "\nIf that may take so long, raise PipelineStrategy(hook_timeout=...)."
        return self._cause(rank, where, summary, advice)

    def _circle(self, wait: Wait, others: Mapping[int, Any]) -> Cause:
        places = {self._rank: wait.text(), **{rank: state[0] for rank, state in others.items()}}
        counts = {place: list(places.values()).count(place) for place in places.values()}
        odd = min(sorted(places), key=lambda rank: (counts[places[rank]], _common(places[rank])))
        lines = "; ".join(
            f"rank {self._pipeline_rank(rank)} (global rank {rank}) in {place}"
            for rank, place in sorted(places.items())
        )
        summary = f"the ranks wait for each other, for {self.step_timeout:g} s: {lines}"
        return self._cause(odd, places[odd], summary, WAY_OUT, silent=False)

    def _warn(self, wait: Wait, waited: float, rank: int) -> None:
        text = (
            f"rank {self._pipeline_rank(self._rank)} has waited {waited:.0f} s in {wait.text()}: rank "
            f"{self._pipeline_rank(rank)} (global rank {rank}) is alive and busy with "
            f"{_place(self._seen[rank].state)}; it has {self.hook_timeout:g} s (hook_timeout)"
        )
        _LOG.warning(text)

    # The end of a wait

    def _end(self, wait: Wait, cause: Cause) -> None:
        """Tell all, and end the wait."""
        stands = self.notes.put_first(wait.key, cause.to_text())
        self.decided[wait.key] = Cause.from_text(stands) if stands else cause
        wait.is_over = True
        if wait.group is not None:
            break_off(wait.group)
            if works_on_device(wait.group):
                abort_devices(self.groups)


WAY_OUT = (
    "\nEvery rank must do the same in the same order: `trainer.save_checkpoint`, logging with sync_dist, the "
    "values of metrics and collectives belong outside of `if trainer.is_global_zero` and `rank_zero_only`; "
    "loaders must give every rank as many batches."
)

_USUAL = (
    "the start of a step", "the end of a step", "asking all ranks", "gathering from all stages", "comparing",
    "logging in a hook",
)  # fmt: skip


def _common(place: str) -> bool:
    """Messages of a step, and what follows batches and epochs, are what ranks usually wait in."""
    return place[:1].isdigit() or place.startswith(_USUAL)


def _key(rank: int) -> str:
    return f"alive/{rank}"


def _place(state: Mapping[str, Any]) -> str:
    waits = state.get("run") or ()
    return str(waits[0][0] if waits else state.get("doing", "an unknown action"))


def break_off(group: dist.ProcessGroup) -> None:
    """End everything that this process waits for in a group, from any thread, with an exception there.

    gloo has no way to say so (its `abort` frees nobody, torch 2.13): but a receive that times out closes all
    connections of its group.
    """
    _break_off_host(group)


def abort_devices(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort the communicators of devices, from any thread: what they run ends, and so do waits for it.

    All together, for one may wait for what another's kernel holds up (pytorch#119797).
    """
    chosen = [group for group in groups if group.size() > 1 and works_on_device(group)]
    nccl = next((backend for group in chosen if (backend := _nccl_of(group)) is not None), None)
    if nccl is not None:
        nccl._group_start()
    try:
        for group in chosen:
            group.abort()
    except RuntimeError:
        _LOG.exception("communicators could not be aborted")
    finally:
        if nccl is not None:
            nccl._group_end()


def works_on_device(group: dist.ProcessGroup) -> bool:
    """Whether a group runs on a device, which nothing but its abort can end: NCCL, or a backend of others."""
    return type(group) is not dist.ProcessGroup or _nccl_of(group) is not None


def _nccl_of(group: dist.ProcessGroup) -> Any:
    cuda = torch.device("cuda")
    if not dist.is_nccl_available() or cuda not in group._device_types:
        return None
    backend = group._get_backend(cuda)
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def _break_off_host(group: dist.ProcessGroup) -> None:
    """A peer whose connection is closed fails at once, which closes no other: so each is asked."""
    for peer in range(group.size()) if talks_on_host(group) else ():
        if peer != group.rank():
            try:
                work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, 0x1EAF)
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as wanted:
                _LOG.debug("the waits of %s ended: %s", group.group_desc, wanted)


def talks_on_host(group: dist.ProcessGroup) -> bool:
    """Whether a group carries tensors in host memory."""
    return "cpu" in {device.type for device in group._device_types}


def closed_peers(group: dist.ProcessGroup) -> list[int]:
    """Global ranks of a gloo group whose connection is closed: a receive from them fails at once."""
    found: list[int] = []
    if not talks_on_host(group):
        return found
    for peer, rank in enumerate(dist.get_process_group_ranks(group)):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, 0x1EAF)
        except RuntimeError:
            found.append(rank)
    return found
