"""Removes and links checkpoints so that a look-up always finds a whole one."""

import os
from collections.abc import Callable
from pathlib import Path

from lightning_pipeline.checkpoint.folder import discard, point_link, sync_folder


class Retention:
    """What ModelCheckpoint asks for after a save. On global rank 0 only.

    Args:
        later: Runs an action once the save in flight is complete, at once if there is none; drops it when
            that save fails.
    """

    def __init__(self, later: Callable[[Callable[[], None]], None]) -> None:
        self._later = later
        self._linked: list[Path] = []

    def remove(self, path: Path) -> None:
        """Remove a checkpoint; while a link leads to it, not until that link leads elsewhere."""
        self._later(lambda: self._remove(path))

    def link(self, target: Path, link: Path) -> None:
        """Make a link lead to a checkpoint, in one step."""
        self._later(lambda: self._link(target, link))

    def _remove(self, path: Path) -> None:
        if _is_linked(path):
            self._linked.append(path)
        elif os.path.lexists(path):
            discard(path)

    def _link(self, target: Path, link: Path) -> None:
        if link.absolute() == target.absolute():
            return
        old = point_link(link, target)
        sync_folder(link.parent)
        if old is not None:
            discard(old)
        waiting, self._linked = self._linked, []
        for path in waiting:
            self._remove(path)


def _is_linked(path: Path) -> bool:
    if path.is_symlink() or not path.exists():
        return False
    links = (entry for entry in path.parent.iterdir() if entry.is_symlink())
    return any(link.parent / os.readlink(link) == path for link in links)
