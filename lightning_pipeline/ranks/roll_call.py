"""The start of a run: there is no group and no lookout yet, and a rank may not come, or be lost."""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_pipeline.errors import PipelineError, StageFailedError, StageTimeoutError
from lightning_pipeline.ranks.aside import Aside
from lightning_pipeline.ranks.cause import summary_of
from lightning_pipeline.ranks.failure import is_lost
from lightning_pipeline.ranks.notes import Notes

T = TypeVar("T")
_FAILED = "failed"
_BEATS = 16  # signs of life in a step_timeout, but at least one a second
_LONGEST_NAP = 0.02  # seconds between two looks at the notes
_LINGER_SECONDS = 2.0
_TOLD = 0.5  # seconds for what has the same deadline to say why, before it is left behind


def hosted_elsewhere() -> bool:
    """Whether the launcher's agent hosts the store, as `torchrun`'s does, and not global rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def reach_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store:
    """The store of a run; global rank 0 hosts it, unless the launcher's agent does.

    Args:
        address: Of the host.
        port: Of the store.
        rank: This global rank.
        size: Of the world.
        timeout: Longest wait for the host.

    Raises:
        StageTimeoutError: It did not answer.
    """
    hosts = rank == 0 and not hosted_elsewhere()

    def reach() -> Store:
        return dist.TCPStore(
            address, port, size, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=hosts
        )

    if hosts:
        return reach()
    seconds = timeout.total_seconds()
    asked = Aside(reach)
    asked.join(seconds + _TOLD)
    if asked.is_alive() or isinstance(asked.error, dist.DistError):
        who = "the launcher's agent" if hosted_elsewhere() else "global rank 0"
        raise StageTimeoutError(
            f"global rank {rank} waited {seconds:g} s (init_timeout) for {who}, which hosts the store of the "
            f"run at {address}:{port}: its process has not started, has ended, is stopped, or cannot be "
            "reached. See its own output"
        ) from asked.error
    store: Store = asked.result()
    return store


class RollCall:
    """Counts the ranks that come to the start of a run; names who does not, or is lost soon after.

    All ranks make one together. Each gives signs of life until `close`.

    Args:
        store: Of the run.
        rank: This global rank.
        size: Of the world.
        init_timeout: Longest wait for a rank that does not come, and for each thing done together.
        step_timeout: Longest wait for a rank that came and gives no more signs of life.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, init_timeout: timedelta, step_timeout: timedelta
    ) -> None:
        self._rank, self._size = rank, size
        self._patience, self._silence = init_timeout.total_seconds(), step_timeout.total_seconds()
        # A process may join several times, and torchrun's agent may keep its store for the next attempt.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        count = store.add(f"lightning_pipeline/start/{attempt}/{rank}", 1)
        self.store = PrefixStore(f"lightning_pipeline/start/{attempt}/{count}", store)
        self._notes = Notes(self.store)
        self._seen: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="lightning_pipeline start", daemon=True)
        self._beats.start()

    def come(self) -> None:
        """Wait until all ranks have come.

        Raises:
            StageTimeoutError: Some have not, within `init_timeout`.
            StageFailedError: A rank was lost, or failed.
        """
        keys = {rank: f"here/{rank}" for rank in range(self._size)}
        self._notes.put(keys[self._rank], "1")
        deadline, nap = time.monotonic() + self._patience, 0.001
        while len(there := self._notes.get_all(list(keys.values()))) < self._size:
            self._look("the start of the run", [rank for rank in keys if keys[rank] in there])
            if time.monotonic() > deadline:
                missing = [rank for rank in keys if keys[rank] not in there]
                self._end_with(self._not_come(missing), len(missing))
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def stay_away(self, error: Exception) -> None:
        """This rank has failed before it came: tell those that wait for it, or will.

        Args:
            error: What it raises.
        """
        text = f"global rank {self._rank} failed before it came to the start of the run: {summary_of(error)}"
        self._notes.put_first(_FAILED, json.dumps({"text": text, "lost": 0}))
        self._linger(0)

    def within(self, what: str, work: Callable[[], T]) -> T:
        """Do something together with the other ranks.

        Args:
            what: For messages: `making groups`.
            work: Waits for the others, for `init_timeout` at most.

        Raises:
            StageFailedError: A rank was lost meanwhile, or failed.
        """
        aside, deadline, nap = Aside(work), time.monotonic() + self._patience + _TOLD, 0.0005
        while aside.is_alive():
            aside.join(nap)
            nap = min(2 * nap, _LONGEST_NAP)
            if nap == _LONGEST_NAP:
                self._look_aside(what, aside)
            if time.monotonic() > deadline:
                text = f"{what} took longer than {self._patience:g} s (init_timeout); all ranks are alive"
                self._end_with(text, 0)
        if aside.error is not None:
            self._explain(what, aside.error)
        result: T = aside.result()
        return result

    def _look_aside(self, what: str, aside: Aside) -> None:
        """Raise who is lost; not where this rank is done as others were, who have left since."""
        try:
            self._look(what, range(self._size))
        except StageFailedError:
            aside.join(_TOLD)
            if aside.is_alive() or not isinstance(aside.error, PipelineError | None):
                raise

    def close(self) -> None:
        """No more signs of life: others watch now, or this rank has failed."""
        self._stop.set()
        self._beats.join(_TOLD)

    # What went wrong

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(min(1.0, self._silence / _BEATS)):
            count += 1
            self._notes.put(f"alive/{self._rank}", str(count))

    def _look(self, what: str, ranks: Sequence[int]) -> None:
        """Raise what a rank of these has failed with, or who is silent."""
        told = self._notes.get(_FAILED)
        if told:
            self._raise(**json.loads(told))
        if self._notes.is_gone or self._notes.silent_for() > self._silence:
            host = "the launcher's agent" if hosted_elsewhere() else "global rank 0"
            self._raise(f"{host}, which hosts the store of the run, is gone or stopped, seen in {what}", 1)
        found, now = self._notes.get_all([f"alive/{rank}" for rank in ranks]), time.monotonic()
        for rank in ranks:
            text = found.get(f"alive/{rank}", "")
            if self._seen.get(rank, (None, now))[0] != text:
                self._seen[rank] = (text, now)
        silent = [rank for rank in ranks if now - self._seen[rank][1] > self._silence and rank != self._rank]
        if silent:
            self._end_with(
                f"{_ranks(silent)} {_has(silent)} given no sign of life for {self._silence:g} s "
                f"(step_timeout) in {what}: the process was killed or is stopped, or its machine is cut off",
                len(silent),
            )

    def _explain(self, what: str, error: BaseException) -> None:
        """A collective that broke names nobody: wait until somebody does, or who is lost has been silent."""
        if isinstance(error, PipelineError):  # every rank raises it
            return
        deadline = time.monotonic() + self._silence + 1
        while (is_lost(error) or isinstance(error, dist.DistError)) and time.monotonic() < deadline:
            self._look(what, range(self._size))
            time.sleep(_LONGEST_NAP)
        text = f"global rank {self._rank} failed in {what}: {summary_of(error)}"
        self._notes.put_first(_FAILED, json.dumps({"text": text, "lost": 0}))
        self._linger(0)

    def _not_come(self, missing: list[int]) -> str:
        return (
            f"{_ranks(missing)} {_has(missing)} not come to the start of the run within {self._patience:g} s "
            f"(init_timeout); {self._size - len(missing)} of {self._size} ranks have. The process has not "
            "started, has ended before, or cannot reach the store of the run: see its own output"
        )

    def _end_with(self, text: str, lost: int) -> NoReturn:
        """Tell all, and raise what stands."""
        own = json.dumps({"text": text, "lost": lost})
        self._raise(**json.loads(self._notes.put_first(_FAILED, own) or own))

    def _raise(self, text: str, lost: int) -> NoReturn:
        self._linger(lost)
        kind = StageTimeoutError if "_timeout)" in text else StageFailedError
        raise kind(f"global rank {self._rank} could not start: {text}")

    def _linger(self, lost: int) -> None:
        """Let the others read it before the process that may host the store ends."""
        read, until = self._notes.add("read", 1), time.monotonic() + _LINGER_SECONDS
        hosts = self._rank == 0 and not hosted_elsewhere()
        while hosts and 0 < read < self._size - lost and time.monotonic() < until:
            time.sleep(0.005)
            read = self._notes.add("read", 0)


def _ranks(ranks: list[int]) -> str:
    return f"global rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _has(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"
