"""The command line: `lightning-pipeline` or `python -m lightning_pipeline`."""

import sys
from collections.abc import Sequence
from typing import Any

import jsonargparse

from lightning_pipeline.commands import consolidate, inspect, plan, verify_folder
from lightning_pipeline.errors import PipelineError

COMMANDS: dict[str, Any] = {
    "checkpoint": {
        "_help": "Consolidate, inspect or verify a checkpoint folder.",
        "consolidate": consolidate,
        "inspect": inspect,
        "verify": verify_folder,
    },
    "plan": plan,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. What we refuse ends the process with its message and exit code 1.

    Args:
        arguments: Default: the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["plan"]:  # has a parser of its own, which reads configs of LightningCLI
            plan(given[1:])
        else:
            jsonargparse.auto_cli(COMMANDS, args=given, prog="lightning-pipeline")
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
