"""Two machines whose link is cut: packets are lost, and no connection is reset. Each names the other in time."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cases import BOUND, FAULTS, Faulty, Ranks, after_fault, fit, outcomes_of

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
NOBODY = "02:00:00:00:00:99"


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces, 10.231.7.1 and 10.231.7.2, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` is not there to make network namespaces with")
    names = [f"lp{os.getpid()}_{index}" for index in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for index, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.231.7.{index + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove(names)
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    yield names
    remove(names)


def remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def on_two_machines(names: list[str], folder: str) -> None:
    """Each rank moves to its machine before it opens a connection; rank 1 cuts the link in its second batch."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{names[int(os.environ['RANK'])]}") as namespace:
        assert libc.setns(namespace.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    os.environ |= {"MASTER_ADDR": "10.231.7.1", "GLOO_SOCKET_IFNAME": "cable"}

    def cut() -> None:
        for name, other in zip(names, ("10.231.7.2", "10.231.7.1"), strict=True):
            ip(
                "-n",
                name,
                "neighbour",
                "replace",
                other,
                "lladdr",
                NOBODY,
                "dev",
                "cable",
                "nud",
                "permanent",
            )

    FAULTS["cut"] = cut
    fit(Faulty("cut", "on_train_batch_end", 1), folder, 2)


def test_ranks_that_are_cut_off_name_each_other(ranks: Ranks, tmp_path: Path, machines: list[str]) -> None:
    outcomes = outcomes_of(ranks, on_two_machines, machines, str(tmp_path))
    for outcome, other in zip(outcomes, outcomes[::-1], strict=True):
        assert outcome.exit_code == 1, outcome
        assert after_fault(outcome, outcomes) < BOUND
        assert "StageTimeoutError" in outcome.output
        assert f"(global rank {other.rank}) is stuck" in outcome.output
