"""The same script runs under Lightning's own launcher and under torchrun, on one node or two."""

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.pool import Pool
from tests.ranks import launched
from tests.ranks.launched_once import totals
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]

TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
SCRIPT = ["-m", "tests.ranks.launched"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(launcher: str) -> list[list[str]]:
    if launcher == "lightning":
        return [[sys.executable, "-W", "ignore", "-m", "tests.ranks.unguarded", "2", "1", "2"]]
    if launcher == "torchrun":
        one_node = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        return [[*TORCHRUN, *one_node, *SCRIPT, "2", "1", "2"]]
    port = free_port()
    two_nodes = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [[*TORCHRUN, *two_nodes, f"--node-rank={node}", *SCRIPT, "1", "2", "2"] for node in (0, 1)]


@pytest.mark.parametrize("launcher", ["lightning", "torchrun", "two nodes"])
def test_two_trainers_in_one_script(launcher: str) -> None:
    started = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands(launcher)
    ]
    ended = [process.communicate(timeout=110) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), ended
    check("".join(out for out, _ in ended))


def check(printed: str) -> None:
    found = re.findall(r"run (\d) rank (\d) stage (\d) total ([\d.]+)", printed)
    assert sorted(line[:3] for line in found) == [
        (r, k, s) for r in "01" for k, s in (("0", "1"), ("1", "0"))
    ]
    assert len({line[3] for line in found}) == 1


def a_node_of_two() -> str:
    """The script in this rank, told by torchrun's variables that it is alone on its node."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        launched.main(1, 2, 2)
    return printed.getvalue()


def test_two_nodes_of_a_rank_each_train_two_stages(ranks: Ranks) -> None:
    check("".join(ranks(2)(a_node_of_two, group=False)))


def cells() -> str:
    """Run a notebook in this process, which is no rank."""
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "MASTER")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_module("tests.ranks.forked", run_name="__main__")
    return printed.getvalue()


def test_a_notebook_forks_its_ranks() -> None:
    alone = Pool(1)  # a new process: one that has run a backward cannot be forked for another
    try:
        (found,) = alone(cells, group=False, timeout=110)
    finally:
        alone.close()
    assert on_one_device() in found


def on_one_device() -> str:
    module, run = Regression(), trainer(None, max_epochs=1)
    run.fit(module, loader(), loader(seed=4))
    return totals(module, run)


def test_a_script_spawns_its_ranks() -> None:
    script = [sys.executable, "-W", "ignore", "-m", "tests.ranks.spawned"]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=110, check=True)
    assert on_one_device() in ended.stdout
