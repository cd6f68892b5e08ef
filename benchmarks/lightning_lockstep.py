"""Runs Lightning's own tests in two processes in step, as the two ranks of a pipeline.

`benchmarks/lightning_suite.py TESTS --stages 2` uses this; it is also the pytest plugin of each process.
Both run the same selection and wait for each other before each test, which finds itself as under `torchrun`,
with a store and a folder of its own. `BoringModel.layer` is made of two. A process that dies or hangs ends
the pair, and a new pair goes on with the test after.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

HOST, RANKS = "127.0.0.1", 2
CONTROL = "LIGHTNING_LOCKSTEP_STORE"
LEFT = "LIGHTNING_LOCKSTEP_LEFT"
RESULTS, TIMEOUT = "LIGHTNING_SUITE_RESULTS", "LIGHTNING_SUITE_TIMEOUT"
LAYERS = "LIGHTNING_SUITE_LAYERS"

# ---- the plugin


class _InStep:
    """This process's side.

    Args:
        port: Of the store that both reach.
        rank: This process.
        progress: Where the tests that are begun are written down.
    """

    def __init__(self, port: int, rank: int, progress: Path) -> None:
        self._control = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=600))
        self.rank, self._progress = rank, progress
        self._number = 0
        self._store: Any = None

    def begin(self, name: str) -> None:
        """Wait for the other process to come to the same test, and make its store."""
        self._number += 1
        self._tell("test", name)
        for peer in range(RANKS):
            met = self._asked("test", peer)
            assert met == name, f"rank {peer} is at {met}, and rank {self.rank} at {name}"
        with self._progress.open("a") as file:
            file.write(json.dumps({"test": name, "outcome": "begun", "trainers": [], "reason": ""}) + "\n")
        if self.rank == 0:
            self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            self._tell("port", str(self._store.port))
        os.environ.update(self.reached_at())
        torch.set_default_dtype(torch.float32)  # whatever a test that failed has left
        torch.set_grad_enabled(True)
        random.seed(self._number)
        torch.manual_seed(self._number)

    def reached_at(self) -> dict[str, str]:
        """The variables that say where the store of this test is."""
        return {"MASTER_ADDR": HOST, "MASTER_PORT": self._asked("port", 0)}

    def end(self) -> None:
        """Wait for the other, which may still need the store."""
        self._tell("end", "")
        for peer in range(RANKS):
            self._asked("end", peer)
        self._store = None

    def folder(self, make: Any) -> Path:
        """One for both."""
        if self.rank == 0:
            self._tell("folder", str(make()))
        return Path(self._asked("folder", 0))

    def _tell(self, what: str, value: str) -> None:
        self._control.set(f"{self._number}/{what}/{self.rank}", value)

    def _asked(self, what: str, peer: int) -> str:
        return str(self._control.get(f"{self._number}/{what}/{peer}").decode())


_in_step: list[_InStep] = []


def store_of_now() -> dict[str, str]:
    """The variables that say where the store is, which a test that sets the environment anew has lost."""
    return _in_step[0].reached_at() if _in_step else {}


def pytest_configure(config: Any) -> None:
    """Join the other process, where there is one."""
    if LAYERS in os.environ:
        _two_layers()
    if CONTROL in os.environ:
        progress = Path(os.environ[RESULTS])
        _in_step.append(_InStep(int(os.environ[CONTROL]), int(os.environ["RANK"]), progress))


def pytest_unconfigure(config: Any) -> None:
    """End processes that a test of another strategy has started and left: Python would wait for them."""
    for child in multiprocessing.active_children():
        child.kill()


def _two_layers() -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    original = BoringModel.__init__

    def init(self: Any) -> None:
        original(self)
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))

    BoringModel.__init__ = init  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep what is left of a run that was broken off, and write down what there is."""
    if LEFT not in os.environ:
        return
    file = Path(os.environ[LEFT])
    if file.exists():
        left = set(json.loads(file.read_text()))
        items[:] = [item for item in items if item.nodeid in left]
    elif _in_step[0].rank == 0:
        file.write_text(json.dumps([item.nodeid for item in items]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: Any) -> Iterator[Any]:
    """Begin and end each test together."""
    if not _in_step:
        return (yield)
    _in_step[0].begin(item.nodeid)
    result = yield
    _in_step[0].end()
    return result


@pytest.fixture
def tmp_path(tmp_path_factory: Any) -> Path:
    """One folder for both processes."""
    if not _in_step:
        return Path(tmp_path_factory.mktemp("alone"))
    return _in_step[0].folder(lambda: tmp_path_factory.mktemp("both"))


# ---- the command


def run_pairs(command: list[str], tests: Path, environment: dict[str, str], files: list[Path]) -> None:
    """Run a selection in two processes, and in new ones after a test in which one died or hung.

    Args:
        command: Of pytest, without this plugin.
        tests: Working folder.
        environment: Of both.
        files: Where each rank writes its lines of JSON; emptied.
    """
    left = files[0].with_suffix(".left")
    for file in [*files, left]:
        file.unlink(missing_ok=True)
    timeout = int(environment[TIMEOUT])
    while True:
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        ranks = [
            _started(command, tests, {**environment, CONTROL: str(store.port), LEFT: str(left)}, rank, file)
            for rank, file in enumerate(files)
        ]
        why = _watched(ranks, files, 3 * timeout)
        begun = [json.loads(line)["test"] for line in files[0].read_text().splitlines()] if why else []
        if not why:
            return
        assert begun, f"{why} before the first test: see {files[0].with_suffix('.log')}"
        for file in files:
            _write_down(file, begun[-1], why)
        rest = [name for name in json.loads(left.read_text()) if name not in set(begun)]
        if not rest:
            return
        left.write_text(json.dumps(rest))


def _started(
    command: list[str], tests: Path, environment: dict[str, str], rank: int, results: Path
) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "ROLE_WORLD_SIZE": str(RANKS),
        "TORCHELASTIC_RUN_ID": "lockstep", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", RESULTS: str(results),
    }  # fmt: skip
    log = results.with_suffix(".log").open("a")
    return subprocess.Popen(
        command, cwd=tests, env={**environment, **own}, stdout=log, stderr=log, start_new_session=True
    )


def _watched(ranks: list[subprocess.Popen[bytes]], files: list[Path], patience: float) -> str:
    """Why the pair was ended; empty where both came to their end."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code in (0, 1, 5) for code in codes):  # all passed, some failed, none were chosen
            return ""
        ended = [number for number, code in enumerate(codes) if code not in (None, 0, 1, 5)]
        quiet = time.time() - max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
        if ended or (quiet > patience and any(file.exists() for file in files)):
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
            return f"rank {ended[0]} died" if ended else f"no end in {patience:g} s"
        time.sleep(0.5)


def _write_down(file: Path, test: str, why: str) -> None:
    """The end of a test that has none of its own."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not any(line["test"] == test and line["outcome"] != "begun" for line in lines):
        entry = {"test": test, "outcome": "failed", "trainers": ["given"], "reason": why}
        with file.open("a") as results:
            results.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    sys.exit("this is a part of benchmarks/lightning_suite.py")
