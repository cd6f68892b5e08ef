"""Writes Lightning's one file from all stages, and reads a folder where Lightning looks for a file."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint.consolidate import read_whole, to_file
from lightning_pipeline.checkpoint.contents import read_meta
from lightning_pipeline.checkpoint.folder import META, Pace, beside, discard
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.checkpoint.save import Part, write
from lightning_pipeline.errors import CheckpointError

Put = Callable[[dict[str, Any], str], None]
Module = TypeVar("Module", bound=pl.LightningModule | pl.LightningDataModule)


def write_file(
    part: Part, path: Path, ranks: Ranks, integrity: str, pace: Pace | None = None, *, put: Put | None = None
) -> None:
    """Write a one-file checkpoint. Every rank calls this.

    Every rank writes its part of a folder, which the leader makes one file of: tensors go from file to file,
    so that no process holds the module.

    Args:
        part: This rank's.
        path: Of the file; replaced when it exists.
        ranks: Of the save.
        integrity: Kind of checksum of what is written in between.
        pace: Entered around each piece of work on a shard.
        put: Saves the checkpoint in place of us, as a plugin does.

    Raises:
        CheckpointWriteError: On every rank; what had the name before still has it.
    """
    what = f"saving {path}"
    folder = Path(ranks.leader(what, lambda: str(beside(path, "partial"))))
    write(part, folder, ranks, integrity, pace)

    def make_file() -> None:
        try:
            if put is not None:
                put(read_whole(folder, trust=True), str(path))
                return
            if path.is_dir() and not path.is_symlink():
                discard(path)
            to_file(folder, path, trust=True, position=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    ranks.leader(what, make_file)


def load_from_checkpoint(
    cls: type[Module], checkpoint_path: str | Path, *, trust_checkpoint: bool = False, **kwargs: Any
) -> Module:
    """As `cls.load_from_checkpoint`, also from a folder that a pipeline has written.

    Args:
        cls: A LightningModule or LightningDataModule.
        checkpoint_path: The folder, or a file.
        trust_checkpoint: Whether objects of any class may be unpickled from a folder, such as modules among
            the hyper-parameters; else they are left out, with a warning that names them.
        kwargs: Those of `load_from_checkpoint`: `map_location`, `hparams_file`, `strict`, and arguments of
            the module.

    Returns:
        The module with the checkpoint's weights.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    path = Path(checkpoint_path)
    load: Any = cls.load_from_checkpoint
    if not path.is_dir():
        return load(checkpoint_path, **kwargs)  # type: ignore[no-any-return]
    with _lightning.reading_folders(lambda folder: read_whole(Path(folder), trust=trust_checkpoint)):
        return load(path, **kwargs)  # type: ignore[no-any-return]


def make_folders_known() -> None:
    """Let Lightning meet folders where it opens a checkpoint before there is a strategy.

    `load_from_checkpoint` says what to call for one, where it would only say that it is a folder, and
    LightningCLI takes the hyper-parameters of one.
    """

    def refuse(folder: str) -> dict[str, Any]:
        raise CheckpointError(
            f"checkpoint {folder} is a folder, which each stage has written its part of: call "
            "lightning_pipeline.load_from_checkpoint(cls, folder), or train with "
            "PipelineStrategy(save_distributed_checkpoint=False)"
        )

    _lightning.read_folders_by(refuse)
    _lightning.take_hyper_parameters_from(_hyper_parameters_in)


def _hyper_parameters_in(folder: str) -> dict[str, Any] | None:
    if not (Path(folder) / META).is_file():
        return None
    return dict(read_meta(Path(folder), trust=False).get("hyper_parameters", {}))
