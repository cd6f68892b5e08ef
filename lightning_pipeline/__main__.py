"""The command line: `lightning-pipeline` or `python -m lightning_pipeline`."""

import sys
from collections.abc import Sequence
from typing import Any

import jsonargparse

from lightning_pipeline.checkpoint.commands import consolidate, inspect, verify_folder
from lightning_pipeline.errors import CheckpointError

COMMANDS: dict[str, Any] = {
    "checkpoint": {
        "_help": "Consolidate, inspect or verify a checkpoint folder.",
        "consolidate": consolidate,
        "inspect": inspect,
        "verify": verify_folder,
    }
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. A checkpoint that is not whole ends the process with its message and exit code 1.

    Args:
        arguments: Default: the process's own.
    """
    try:
        jsonargparse.auto_cli(COMMANDS, args=list(sys.argv[1:] if arguments is None else arguments))
    except CheckpointError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
