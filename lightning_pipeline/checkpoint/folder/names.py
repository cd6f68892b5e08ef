"""What a checkpoint folder is called and what lies in it."""

import os
import re
import secrets
import socket
import zlib
from pathlib import Path

from lightning_pipeline.errors import CheckpointError

FORMAT_VERSION = 1
META = "meta.pt"
"""What is no tensor: loops, callbacks, schedulers, hyper-parameters. Lightning's name for it."""

METADATA = ".metadata"
"""DCP's list of what lies where."""

MANIFEST = "manifest.json"
"""Written last: a folder without it is not a checkpoint."""

OURS = "lightning_pipeline"
"""Key in `meta.pt` of what this package adds to Lightning's."""

MODEL = "model"
_MARKS = ("partial", "old", "data")
_LEFTOVER = re.compile(r"^(?:.+\.)?lp-(?P<mark>partial|old|data)-(?P<host>[0-9a-f]+)-(?P<pid>\d+)-[0-9a-f]+$")


def optimizer_key(index: int) -> str:
    """Key of an optimizer's state in the folder."""
    return f"optimizer_{index}"


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint folder, whole or not, and not a one-file checkpoint."""
    return path.is_dir()


def local_path(path: object) -> Path:
    """A path on this machine's file systems.

    Raises:
        CheckpointError: A remote address: folders are committed by renaming, which no object store has.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text:
        raise CheckpointError(
            f"checkpoint path {text!r} is remote, and a checkpoint folder is made complete by renaming it, "
            "which remote stores cannot do atomically: save to a local or shared file system and copy the "
            "folder, its manifest.json last"
        )
    return Path(text)


def beside(path: Path, mark: str) -> Path:
    """A new name beside a path that says whose it is: no look-up of a checkpoint takes it for one.

    It has nothing of the path's own name: Lightning takes all that contains `hpc_ckpt_` for a checkpoint.

    Args:
        path: Of the checkpoint.
        mark: `partial` while it is written, `old` while it is removed, `data` where a link points at it.
    """
    assert mark in _MARKS, f"unknown mark {mark!r}"
    return path.with_name(f"lp-{mark}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def is_abandoned(path: Path) -> bool:
    """Whether a path is what a save left behind whose process is gone.

    A save of another host counts as alive: its processes cannot be seen from here.
    """
    match = _LEFTOVER.match(path.name)
    if match is None or match["mark"] == "data" or match["host"] != _host():
        return False
    pid = int(match["pid"])
    if pid == os.getpid():
        return True  # a save of this process has ended before the next one looks
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def is_link_data(path: Path) -> bool:
    """Whether a path is a folder that only a link of ours leads to."""
    match = _LEFTOVER.match(path.name)
    return match is not None and match["mark"] == "data"
