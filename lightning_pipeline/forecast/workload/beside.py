"""Company for what is timed: other processes that do the same meanwhile, as ranks on one machine do."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

_MOST_ROUNDS = 10_000  # of a copy that nobody ends


@contextmanager
def copies_beside(count: int, work: Callable[[], object]) -> Iterator[None]:
    """While the block runs, so many forks of this process do the same work again and again, on a core each.

    Ranks of one machine share its caches, its memory's bandwidth, often one core's halves. A copy computes
    on one thread, for threads of OpenMP do not live on in a fork; one that cannot work at all ends, and the
    block runs all the same.

    Args:
        count: Copies; 0 for none.
        work: Without communication.
    """
    parent, copies = os.getpid(), []
    try:
        for _ in range(count):
            copy = os.fork()
            if copy == 0:
                _go_on(parent, work)
            copies.append(copy)
        yield
    finally:
        for copy in copies:
            with suppress(ProcessLookupError):
                os.kill(copy, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(copy, 0)


def _go_on(parent: int, work: Callable[[], object]) -> None:
    """Work until the parent ends this process, or is gone."""
    try:
        torch.set_num_threads(1)
        for _ in range(_MOST_ROUNDS):
            if os.getppid() != parent:
                break
            work()
    finally:
        os._exit(0)  # nothing of the parent's is cleaned up twice
