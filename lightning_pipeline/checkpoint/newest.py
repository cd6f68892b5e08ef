"""`PipelineStrategy(resume="auto")`: a job that was started again goes on where the one before was."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder import MANIFEST, read_manifest
from lightning_pipeline.errors import CheckpointError


def newest_verified(folders: Iterable[Path]) -> str | None:
    """The checkpoint with the most steps in some folders that is whole; called on one rank.

    A logger's `version_3/checkpoints` stands for those of all versions: a job that is started again has a new
    one.

    Args:
        folders: Of this run's `ModelCheckpoint`s.
    """
    found = {path for folder in folders for path in _candidates(folder)}
    for path in sorted(found, key=_age, reverse=True):
        try:
            verify(path)
        except CheckpointError as error:
            rank_zero_warn(f"resume='auto' leaves out a checkpoint that is not whole: {error}")
            continue
        rank_zero_info(f"resume='auto': going on from {path}")
        return str(path)
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    versions = folder.parent.name.startswith("version_")
    for one in folder.parent.parent.glob(f"version_*/{folder.name}") if versions else [folder]:
        for manifest in one.glob(f"*/{MANIFEST}"):
            if _step(manifest.parent) >= 0:
                yield manifest.parent.resolve()


def _step(path: Path) -> int:
    try:
        return read_manifest(path).step
    except CheckpointError:
        return -1


def _age(path: Path) -> tuple[int, float]:
    return _step(path), (path / MANIFEST).stat().st_mtime
