"""Writes one rank's part of a checkpoint through DCP, with checksums and without losing a cause."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from typing_extensions import override

from lightning_pipeline.checkpoint.folder.hashing import HashingStream
from lightning_pipeline.checkpoint.folder.pace import Pace
from lightning_pipeline.errors import CheckpointWriteError


class _HashingFiles(FileSystem):
    """Opens files for writing as hashing streams."""

    def __init__(self, integrity: str, pace: Pace | None) -> None:
        self._integrity, self._pace = integrity, pace
        self.files: dict[str, dict[str, Any]] = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", "the writer only writes"
        stream = HashingStream(Path(path), self._integrity, self._pace)
        try:
            yield stream
        except Exception as error:
            raise _translated(Path(path), stream.error or error) from error
        finally:
            stream.close()
        self.files[Path(path).name] = {"size": stream.size, "checksum": stream.checksum()}


def _translated(path: Path, error: Exception) -> CheckpointWriteError:
    room = ""
    try:
        statistics = os.statvfs(path.parent)
        room = f" ({statistics.f_bavail * statistics.f_frsize / 2**20:.1f} MiB free)"
    except OSError:
        room = ""
    return CheckpointWriteError(f"{path} could not be written{room}: {type(error).__name__}: {error}")


class Writer(FileSystemWriter):
    """DCP's writer, that keeps sizes and checksums of what it wrote.

    Args:
        folder: New.
        integrity: Kind of checksum.
        pace: Entered around each piece of work.
    """

    def __init__(self, folder: Path, integrity: str, pace: Pace | None = None) -> None:
        super().__init__(folder, thread_count=1)
        self.integrity = integrity
        self._hashing = _HashingFiles(integrity, pace)
        self.fs = self._hashing
        self.aliases: dict[str, str] = {}

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Size and checksum of each file that this rank wrote."""
        return {name.removesuffix(".tmp"): entry for name, entry in self._hashing.files.items()}

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without the path: it changes at the commit

    @override
    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write DCP's metadata; a tied tensor is listed under each name, at one place."""
        for alias, name in self.aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = tuple(alias.split(".", 1))
        super().finish(metadata, [*results, *map(self._renamed, results)])

    def _renamed(self, results: Sequence[Any]) -> list[Any]:
        of = {name: [a for a, n in self.aliases.items() if n == name] for name in self.aliases.values()}
        return [
            _Placed(MetadataIndex(alias, result.index.offset, result.index.index), result.storage_data)
            for result in results
            for alias in of.get(result.index.fqn, ())
        ]


class _Placed:
    """What DCP's `finish` reads of a result of writing."""

    def __init__(self, index: MetadataIndex, storage_data: Any) -> None:
        self.index, self.storage_data = index, storage_data


def check_owners(plans: Sequence[SavePlan], owners: Sequence[int]) -> None:
    """Refuse a key that two stages want to write: only one of the values would be kept.

    Args:
        plans: Of each global rank.
        owners: The pipeline rank of each; replicas write the same.

    Raises:
        CheckpointWriteError: With the keys and the ranks.
    """
    seen: dict[str, int] = {}
    twice: dict[str, tuple[int, int]] = {}
    for plan, owner in zip(plans, owners, strict=True):
        for item in plan.items:
            first = seen.setdefault(item.index.fqn, owner)
            if first != owner:
                twice[item.index.fqn] = (first, owner)
    if twice:
        shown = ", ".join(f"{key} (pipeline ranks {a} and {b})" for key, (a, b) in list(twice.items())[:8])
        raise CheckpointWriteError(
            f"{len(twice)} key(s) would be written by two stages, and one value of each lost: {shown}. "
            "Nothing was written"
        )


def described(metadata: Metadata) -> tuple[Mapping[str, Any], list[str]]:
    """Data type and shape of each tensor, and the keys of other values."""
    tensors, objects = {}, []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[key] = [str(entry.properties.dtype).removeprefix("torch."), *entry.size]
        else:
            objects.append(key)
    return tensors, sorted(objects)
