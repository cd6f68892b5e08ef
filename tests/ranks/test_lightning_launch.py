"""The same script runs under Lightning's own launcher and under torchrun, on one node or two."""

import re
import socket
import subprocess
import sys

import pytest

from tests.ranks.lightning_cases import Regression, loader, trainer

TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
SCRIPT = ["-m", "tests.ranks.launched"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(launcher: str) -> list[list[str]]:
    if launcher == "lightning":
        return [[sys.executable, "-W", "ignore", *SCRIPT, "2", "1", "2"]]
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
    found = re.findall(r"run (\d) rank (\d) stage (\d) total ([\d.]+)", "".join(out for out, _ in ended))
    assert sorted(line[:3] for line in found) == [
        (r, k, s) for r in "01" for k, s in (("0", "1"), ("1", "0"))
    ]
    assert len({line[3] for line in found}) == 1


def test_a_notebook_forks_its_ranks() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.ranks.forked"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert found.returncode == 0, found.stderr
    module, run = Regression(), trainer(None, max_epochs=1)
    run.fit(module, loader(), loader(seed=4))
    total = sum(float(parameter.detach().abs().sum()) for parameter in module.parameters())
    assert f"total {total:.6f} val_loss {float(run.callback_metrics['val_loss']):.6f}" in found.stdout
