"""Waits in a group end when they are broken off, whoever else has left it."""

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_pipeline.ranks.lookout import break_off
from tests.faults.cases import Ranks


def wait_for_one_that_is_silent() -> str:
    """Rank 0 leaves, rank 1 does nothing, rank 2 waits for rank 1; ranks 1 and 2 then meet at the store."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    if group.rank() == 0:
        break_off(group)
    if group.rank() < 2:
        store.wait(["over"], timedelta(seconds=40))
        return ""
    said: list[str] = []

    def wait() -> None:
        try:
            group.recv([torch.empty(1)], 1, 0).wait(timedelta(seconds=30))
        except RuntimeError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while _is_open(group, 0):
        time.sleep(0.01)
    break_off(group)
    waiting.join(5)
    store.set("over", "")
    return "still waiting" if waiting.is_alive() else said[0]


def _is_open(group: dist.ProcessGroup, peer: int) -> bool:
    try:
        group.recv([torch.empty(1)], peer, 1)
    except RuntimeError:
        return False
    return True


def test_a_wait_ends_though_another_rank_of_the_group_has_left(ranks: Ranks) -> None:
    assert "closure" in ranks(3)(wait_for_one_that_is_silent)[2]
