"""Pools of ranks: processes that outlive a test, each running the test's function as one rank.

A pool is started once per world size from a fork server that has torch and lightning loaded, serves every
test of the session, and is thrown away after a failure. Inside a rank the environment is that of `torchrun`,
so a `Trainer(devices=n, accelerator="cpu")` takes its place in the group by itself.
"""

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.rank import Job, serve

PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch._subclasses.fake_tensor",
    "torch.utils.checkpoint",
    "lightning.pytorch",
    "lightning.pytorch.demos.boring_classes",
    "lightning_pipeline",
]
HOST = "127.0.0.1"
START_TIMEOUT = 120.0
GRACE = 8.0  # seconds that the other ranks get after the first failure
OUTPUT_TAIL = 40000

# torch asks a name server for the other end of each connection to a store, 127.0.0.1 as an address of IPv6, which is
# in no file; a question that is lost takes five seconds, and a fit on two ranks puts 18. After one that cannot be
# put torch asks no more. glibc reads this once a process, so it is set before the first.
os.environ.setdefault("RES_OPTIONS", "attempts:0")


@dataclass
class Outcome:
    """How one rank ended a run.

    Attributes:
        rank: The rank.
        value: What the function returned; None when it did not return.
        error: The exception that it raised, or a RuntimeError with its text when that cannot be pickled.
        report: The traceback, the stacks of a hanging rank, or the exit code in words.
        exit_code: Of a process that ended by itself during the run (a signal is negative), else None.
        hung: Whether the rank was still running when the time was over.
        seconds: From the start of the run to the rank's end of it.
        ended: When that was, as `time.monotonic` says, which is one clock for all processes.
        output: The end of what it wrote to stdout and stderr.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    report: str = ""
    exit_code: int | None = None
    hung: bool = False
    seconds: float = 0.0
    ended: float = 0.0
    output: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None and not self.hung


class RankFailure(AssertionError):
    """One or more ranks raised, hung or died; `outcomes` has all of them, the first failure is told first."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = sorted((o for o in outcomes if not o.ok), key=lambda o: (o.hung, o.seconds))
        parts = [f"{len(failed)} of {len(outcomes)} ranks failed, rank {failed[0].rank} first"]
        for outcome in failed:
            parts.append(
                f"--- rank {outcome.rank} after {outcome.seconds:.2f} s ---\n{outcome.report.rstrip()}"
            )
            if outcome.output.strip():
                parts.append(f"[output of rank {outcome.rank}]\n{outcome.output.rstrip()}")
        super().__init__("\n".join(parts))


@dataclass
class Pool:
    """The ranks of one world size. Call it with a module-level function to run that on every rank."""

    size: int
    _processes: list[Any] = field(default_factory=list)
    _connections: list[Connection] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)
    _folder: Path | None = None

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        group: bool = True,
        rank0_store: bool = False,
    ) -> list[Any]:
        """Run `function(*args)` on every rank and return what each returned, in rank order.

        Args:
            function: A module-level function.
            args: The same for every rank, picklable.
            timeout: Seconds for the whole run; hanging ranks are reported with their stacks.
            group: Whether the default process group (gloo) is made before and destroyed after. Without, the
                function or its Trainer makes it.
            rank0_store: Whether rank 0 hosts the store at MASTER_PORT, as under Lightning's launcher, instead
                of the test's process, as under torchrun.

        Raises:
            RankFailure: A rank raised, hung or died.
        """
        outcomes = self._run(
            function, args, timeout=timeout, grace=GRACE, group=group, rank0_store=rank0_store
        )
        if not all(outcome.ok for outcome in outcomes):
            raise RankFailure(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        group: bool = True,
        rank0_store: bool = False,
        dies: bool = False,
        without: Sequence[int] = (),
    ) -> list[Outcome]:
        """Run `function(*args)` where ranks are expected to fail, and return how each ended.

        Args:
            function: A module-level function.
            args: The same for every rank, picklable.
            timeout: Seconds until a rank that still runs counts as hung. All ranks are waited for until then.
            group: As in a plain call.
            rank0_store: As in a plain call.
            dies: Whether an exception ends the rank's process with exit code 1, as in a script, so that its
                sockets close; the traceback is then at the end of `output`.
            without: Ranks that are not waited for, such as those that the test stops.
        """
        return self._run(
            function, args, timeout=timeout, grace=None, group=group, rank0_store=rank0_store, dies=dies,
            without=without,
        )  # fmt: skip

    def close(self) -> None:
        """End every process of the pool, and what those started."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(10)
            connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._logs, self._folder = [], [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            log = self._folder / f"rank{rank}.log"
            process = context.Process(target=serve, args=(rank, theirs, str(log)), daemon=False)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            self._logs.append(log)
        for rank, connection in enumerate(self._connections):
            assert connection.poll(START_TIMEOUT), f"rank {rank} did not start within {START_TIMEOUT:.0f} s"
            assert connection.recv_bytes() == b"ready"

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        timeout: float,
        grace: float | None,
        group: bool,
        rank0_store: bool,
        dies: bool = False,
        without: Sequence[int] = (),
    ) -> list[Outcome]:
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        outcomes: list[Outcome] = []
        try:
            if not self._processes:
                self._start()
            assert self._folder is not None
            folder = tempfile.mkdtemp(prefix="run-", dir=self._folder)
            environment = _run_environment(self.size, store.port, rank0_store)
            message = pickle.dumps(Job(function, args, environment, folder, group, dies))
            for connection in self._connections:
                connection.send_bytes(message)
            outcomes = _Watch(self._processes, self._connections, self._logs).collect(timeout, grace, without)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            if not outcomes or not all(outcome.ok for outcome in outcomes):
                self.close()
        return outcomes


def _run_environment(size: int, store_port: int, rank0_store: bool) -> dict[str, str]:
    environment = {
        "POOL_STORE": f"{HOST}:{store_port}",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(_free_port() if rank0_store else store_port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "pool",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if not rank0_store:
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class _Watch:
    """Waits for the ranks of one run."""

    def __init__(self, processes: list[Any], connections: list[Connection], logs: list[Path]) -> None:
        self._processes, self._connections, self._logs = processes, connections, logs
        self._start = time.monotonic()
        self._done: dict[int, Outcome] = {}

    def collect(self, timeout: float, grace: float | None, without: Sequence[int] = ()) -> list[Outcome]:
        deadline = self._start + timeout
        awaited = set(range(len(self._processes))) - set(without)
        while not awaited <= self._done.keys() and (left := deadline - time.monotonic()) > 0:
            waiting = [rank for rank in range(len(self._processes)) if rank not in self._done]
            ready = wait([self._connections[rank] for rank in waiting], timeout=left)
            for rank in waiting:
                if self._connections[rank] in ready:
                    self._done[rank] = self._receive(rank)
                    if grace is not None and not self._done[rank].ok:
                        deadline = min(deadline, time.monotonic() + grace)
        self._stop_hanging()
        for rank, outcome in self._done.items():
            outcome.output = _tail(self._logs[rank])
        return [self._done[rank] for rank in sorted(self._done)]

    def _receive(self, rank: int) -> Outcome:
        """Read a rank's answer. A connection that closed instead means that its process ended."""
        try:
            value, error, report, ended = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            ended = time.monotonic()
            self._processes[rank].join(10)
            code = self._processes[rank].exitcode
            return self._ended(Outcome(rank, report=_exit_in_words(code), exit_code=code), ended)
        return self._ended(Outcome(rank, value, error, report), ended)

    def _ended(self, outcome: Outcome, when: float) -> Outcome:
        outcome.ended, outcome.seconds = when, when - self._start
        return outcome

    def _stop_hanging(self) -> None:
        hanging = [rank for rank in range(len(self._processes)) if rank not in self._done]
        for rank in hanging:
            os.kill(self._processes[rank].pid, signal.SIGUSR2)
        if hanging:
            time.sleep(0.3)  # for faulthandler to write; a stopped process writes nothing
        for rank in hanging:
            now = time.monotonic()
            report = f"still running after {now - self._start:.1f} s; its stacks end its output"
            self._done[rank] = self._ended(Outcome(rank, report=report, hung=True), now)


def _exit_in_words(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def _tail(log: Path) -> str:
    return log.read_bytes()[-OUTPUT_TAIL:].decode(errors="replace")
