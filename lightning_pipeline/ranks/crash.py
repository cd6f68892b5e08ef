"""What a rank knows when a run fails, in a file: the screen of a cluster is soon gone."""

import faulthandler
import platform
import resource
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from lightning_pipeline.ranks.cause import Cause


def write_crash(folder: Path, rank: int, cause: Cause, recent: Sequence[str], settings: object) -> str:
    """Write `crash/rank{r}-{time}.txt`: the cause, last actions, stacks, versions, settings and memory.

    Args:
        folder: The Trainer's `default_root_dir`.
        rank: This global rank.
        cause: The first of the run.
        recent: This rank's last actions.
        settings: Of the strategy.

    Returns:
        A sentence with the path, or why there is no file: it must not hide the cause.
    """
    path = folder / "crash" / f"rank{rank}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    parts = {
        "First cause": f"{cause.who} in {cause.where}: {cause.summary}\n{cause.detail}{cause.advice}",
        "Last actions of this rank": "\n".join(recent),
        "Versions": f"torch {torch.__version__}, lightning {version('lightning')}, "
        f"Python {platform.python_version()}, {platform.platform()}",
        "Settings": repr(settings),
        "Memory": _memory(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            for title, text in parts.items():
                file.write(f"{title}\n{'-' * len(title)}\n{text}\n\n")
            file.write("Stacks of this rank\n-------------------\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
    except OSError as error:
        return f"No crash file was written: {error}"
    return f"Last actions, stacks, settings and memory of this rank: {path}"


def _memory() -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    lines = [f"largest resident size of the process: {peak:.0f} MiB"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        lines.append(torch.cuda.memory_summary(abbreviated=True))
    return "\n".join(lines)
