"""Named points at which tests let something go wrong. In production a point does nothing.

`point` is a look-up of one global; only `injected` ever sets it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAVE_POINTS = (
    "save.shard.before",
    "save.shard.during",
    "save.shard.after",
    "save.manifest.before",
    "save.manifest.during",
    "save.rename.before",
    "save.rename.after",
    "save.removal.during",
    "save.removal.after",
)
"""The points of one save, in their order; the first three on every rank, the others on global rank 0."""

_hook: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Something may go wrong here, if a test says so.

    Args:
        name: Such as `save.shard.during`.
    """
    if _hook is not None:
        _hook(name)


@contextmanager
def injected(hook: Callable[[str], None]) -> Iterator[None]:
    """Inside, call `hook` with the name of every point that is passed. For tests.

    Args:
        hook: May raise, wait, or end the process.
    """
    global _hook
    _hook = hook
    try:
        yield
    finally:
        _hook = None
