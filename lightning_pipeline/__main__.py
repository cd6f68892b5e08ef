"""The command line: `lightning-pipeline` or `python -m lightning_pipeline`."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

_DESCRIPTION = """\
Pipeline parallelism for the LightningModule you already have.

  plan         Predict cut, memory, step and bubble of a run without starting it.
  checkpoint   Convert, consolidate, inspect or verify a checkpoint.

`lightning-pipeline COMMAND --help` says more."""

_COMMANDS = ("plan", "checkpoint")
_OF_CHECKPOINT = ("convert", "consolidate", "inspect", "verify")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. What we refuse ends the process with its message and exit code 1.

    Args:
        arguments: Default: the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="lightning-pipeline",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version("lightning-pipeline"))
    parser.add_argument("command", help="plan or checkpoint")
    parser.parse_args(given[:1] or ["--help"])
    if given[0] not in _COMMANDS:
        close = difflib.get_close_matches(given[0], (*_COMMANDS, *_OF_CHECKPOINT), n=1)
        whole = [f"checkpoint {one}" if one in _OF_CHECKPOINT else one for one in close]
        meant = f"; did you mean {whole[0]}?" if whole else ""
        sys.exit(f"there is no command {given[0]!r}, but {' and '.join(_COMMANDS)}{meant}")
    # Late, for commands bring torch and Lightning, seconds that `--help` and `--version` need not take.
    from lightning_pipeline.commands import checkpoint, plan
    from lightning_pipeline.errors import PipelineError

    try:
        {"plan": plan, "checkpoint": checkpoint}[given[0]](given[1:])
        sys.stdout.flush()
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        sys.exit(141)  # as a shell has it


if __name__ == "__main__":
    main()
