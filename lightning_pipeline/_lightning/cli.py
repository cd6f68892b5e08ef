"""LightningCLI and checkpoints that are folders."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from lightning.pytorch.cli import LightningCLI

__all__ = ["take_hyper_parameters_from"]

_reader: list[Callable[[str], dict[str, Any] | None]] = []


def take_hyper_parameters_from(read: Callable[[str], dict[str, Any] | None]) -> None:
    """Let LightningCLI give the module what a folder named by `--ckpt_path` holds, as it does with a file.

    It opens no folder, and makes the module of its defaults instead. `_parse_ckpt_path`, since 2.6; an
    older Lightning takes none of a checkpoint. To be deleted when the CLI asks the strategy for them.

    Args:
        read: Gives the hyper-parameters in a folder; None where that is no checkpoint.
    """
    if not _reader and hasattr(LightningCLI, "_parse_ckpt_path"):
        original = LightningCLI._parse_ckpt_path

        def parse(cli: LightningCLI) -> None:
            asked = cli.config[cli.config["subcommand"]] if cli.config.get("subcommand") else {}
            path = asked.get("ckpt_path")
            found = _reader[0](os.fspath(path)) if path and os.path.isdir(path) else None
            if found is None:
                return original(cli)
            with TemporaryDirectory() as folder:
                file = Path(folder) / "hyper_parameters.ckpt"
                torch.save({"hyper_parameters": found}, file)
                asked["ckpt_path"] = str(file)
                try:
                    original(cli)
                finally:
                    cli.config[cli.config["subcommand"]]["ckpt_path"] = path

        cast(Any, LightningCLI)._parse_ckpt_path = parse  # for good: it is asked before there is a run
    _reader[:] = [read]
