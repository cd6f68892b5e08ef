"""Reads parts of a checkpoint through DCP, in one process and without running code of the files."""

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from lightning_pipeline.checkpoint.safe import load_object, read_metadata
from lightning_pipeline.errors import CheckpointCorruptError, CheckpointError


Place = Callable[..., torch.Tensor]


class _PlainPlanner(DefaultLoadPlanner):
    """Reads values that are no tensors as plain data."""

    def __init__(self, folder: Path, *, trust: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder, self._trust = folder, trust

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        where = f"entry {key!r} of checkpoint {self._folder}"
        self.state_dict[key] = load_object(value, where, trust=self._trust)


class Reader:
    """The tensors and values of a checkpoint folder, by key.

    Args:
        folder: The checkpoint. Its files were verified.
        trust: Whether objects of any class may be unpickled.

    Raises:
        UnsafeCheckpointError: The list of what lies where would run code or leads outside the folder.
        CheckpointCorruptError: It cannot be read.
    """

    def __init__(self, folder: Path, *, trust: bool) -> None:
        self._folder, self._trust = folder, trust
        self._metadata: Metadata = read_metadata(folder, trust=trust)
        self._places: dict[str, list[tuple[str, int]]] = {}

    @property
    def entries(self) -> Mapping[str, Any]:
        """What is known of each entry without reading it: tensors have a `size`."""
        return self._metadata.state_dict_metadata

    def under(self, prefix: str) -> dict[str, Any]:
        """The entries whose key begins with a prefix, without it."""
        start = f"{prefix}."
        return {k.removeprefix(start): entry for k, entry in self.entries.items() if k.startswith(start)}

    def place_of(self, key: str) -> tuple[Any, ...]:
        """Where an entry's bytes lie: the same for the names of a tied tensor."""
        if not self._places:
            for index, info in self._metadata.storage_data.items():
                self._places.setdefault(index.fqn, []).append((info.relative_path, info.offset))
        return tuple(sorted(self._places[key]))

    def read(self, keys: Iterable[str], place: Place = torch.empty) -> dict[str, Any]:
        """Read entries into new memory.

        Args:
            keys: Of the entries.
            place: Makes the tensor for a size and data type. Default: in memory.

        Raises:
            CheckpointCorruptError: A file cannot be read.
            UnsafeCheckpointError: A value would run code.
        """
        state = {key: _place_for(self.entries[key], place) for key in keys}
        if not state:
            return state
        reader, planner = FileSystemReader(self._folder), _PlainPlanner(self._folder, trust=self._trust)
        try:
            planner.set_up_planner(state, self._metadata, is_coordinator=True)
            reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
            reader.read_data(plan, planner).wait()
        except CheckpointError:
            raise
        except Exception as error:  # damaged files raise anything
            raise CheckpointCorruptError(
                f"checkpoint {self._folder} cannot be read: {type(error).__name__}: {error}"
            ) from error
        return {key: planner.state_dict[key] for key in state}


def _place_for(entry: Any, place: Place) -> Any:
    if isinstance(entry, TensorStorageMetadata):
        return place(entry.size, dtype=entry.properties.dtype)
    return None
