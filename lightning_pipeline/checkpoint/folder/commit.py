"""Gives a written folder its name in one step, so that a look-up finds the old one or the new one."""

import ctypes
import os
import shutil
import sys
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeline.checkpoint.folder import faults
from lightning_pipeline.checkpoint.folder.names import beside, is_abandoned, is_link_data

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step.

    Returns:
        Whether this system and file system can; if not, nothing has changed.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if _is_linux() else None
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return int(rename(*arguments)) == 0


def _is_linux() -> bool:
    return sys.platform == "linux"


def can_exchange(folder: Path) -> bool:
    """Whether names in a folder can be swapped in one step."""
    first, second = beside(folder / "probe", "partial"), beside(folder / "probe", "partial")
    try:
        first.mkdir()
        second.mkdir()
        return exchange(first, second)
    finally:
        for path in (first, second):
            if path.is_dir():
                path.rmdir()


def publish(partial: Path, path: Path) -> None:
    """Give a complete folder its name; whatever had that name goes after that.

    Where two names can be swapped in one step, they are. Elsewhere the name is a link to the folder, and a
    link is replaced in one step.

    Args:
        partial: Complete and synced.
        path: Its name from now on.

    Raises:
        OSError: The name could not be given; what had it before still has it.
    """
    sync_folder(partial)
    faults.point("save.rename.before")
    old = _rename_over(partial, path)
    sync_folder(path.parent)
    faults.point("save.rename.after")
    if old is not None:
        discard(old)
    faults.point("save.removal.after")


def _rename_over(partial: Path, path: Path) -> Path | None:
    """Returns what had the name before, under its new name."""
    if can_exchange(path.parent):
        if os.path.lexists(path):
            return _swapped(partial, path)
        partial.rename(path)
        return None
    data = beside(path, "data")
    partial.rename(data)
    return point_link(path, data)


def _swapped(partial: Path, path: Path) -> Path:
    if not exchange(partial, path):
        raise OSError(f"{path} could not be exchanged with {partial}")
    return _target_to_remove(partial, path)


def _target_to_remove(moved: Path, path: Path) -> Path:
    """A link that had the name goes at once; what goes with it is the folder that only it led to."""
    if not moved.is_symlink():
        return moved
    target = path.parent / os.readlink(moved)
    if is_link_data(target) and target.parent == path.parent:
        moved.unlink()
        return target
    return moved


def point_link(path: Path, target: Path) -> Path | None:
    """Make a name a link to a folder beside it, in one step where it is a link or free.

    Returns:
        What had the name before, where that is to be removed.
    """
    link, old = beside(path, "partial"), None
    link.symlink_to(os.path.relpath(target, path.parent))
    if path.is_symlink():
        previous = path.parent / os.readlink(path)
        old = previous if is_link_data(previous) and previous != target else None
    elif path.exists():
        if exchange(link, path):
            return link
        old = beside(path, "old")  # a folder of another file system or program: there is no single step
        path.rename(old)
    link.replace(path)
    return old


def discard(path: Path) -> None:
    """Remove a folder, link or file. What cannot be removed is left, with a warning.

    It gets another name first: nobody may find half of it.
    """
    try:
        if path.is_symlink() or path.is_file():
            target = path.parent / os.readlink(path) if path.is_symlink() else None
            path.unlink()
            if target is not None and is_link_data(target) and target.parent == path.parent:
                discard(target)
            return
        if path.is_dir():
            old = path if is_abandoned(path) else path.rename(beside(path, "old"))
            faults.point("save.removal.during")
            shutil.rmtree(old)
    except OSError as error:
        rank_zero_warn(f"the old checkpoint {path} could not be removed: {error}")


def clean(folder: Path) -> list[Path]:
    """Remove what saves left in a folder whose processes are gone.

    Returns:
        What was removed.
    """
    left = [path for path in folder.iterdir() if is_abandoned(path)] if folder.is_dir() else []
    used = {os.readlink(path) for path in folder.iterdir() if path.is_symlink()} if folder.is_dir() else set()
    unused = [path for path in folder.iterdir() if is_link_data(path)] if folder.is_dir() else []
    left += [path for path in unused if path.name not in used and _owner_is_gone(path)]
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return left


def _owner_is_gone(path: Path) -> bool:
    return is_abandoned(path.with_name(path.name.replace("lp-data-", "lp-old-")))
