"""Reads parts of a checkpoint in DCP's layout, in one process and without running code of the files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_pipeline.checkpoint.safe import load_object, read_metadata
from lightning_pipeline.errors import CheckpointCorruptError

Place = Callable[[torch.Size, torch.dtype], torch.Tensor]


class Reader:
    """The tensors and values of a checkpoint folder, by key.

    DCP's own `load` copies every tensor from a fresh one into a given one; here the fresh one is what is
    staged, which saves a copy of everything.

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
        self._storage = FileSystemReader(folder)
        self._places: dict[str, list[Any]] = {}
        for index, info in self._metadata.storage_data.items():
            self._places.setdefault(index.fqn, []).append(info)

    @property
    def entries(self) -> Mapping[str, Any]:
        """What is known of each entry without reading it: tensors have a `size`."""
        return self._metadata.state_dict_metadata

    def under(self, prefix: str) -> dict[str, Any]:
        """The entries whose key begins with a prefix, without it."""
        start = f"{prefix}."
        return {k.removeprefix(start): entry for k, entry in self.entries.items() if k.startswith(start)}

    def place_of(self, key: str) -> tuple[str, int]:
        """Where an entry's bytes lie: the same for the names of a tied tensor.

        Raises:
            CheckpointCorruptError: They lie nowhere, or in several pieces.
        """
        places = self._places.get(key, [])
        if len(places) != 1:
            raise CheckpointCorruptError(
                f"entry {key!r} of checkpoint {self._folder} is in {len(places)} pieces instead of one"
            )
        return str(places[0].relative_path), int(places[0].offset)

    def read(self, keys: Iterable[str], place: Place | None = None) -> dict[str, Any]:
        """Read entries into new memory.

        Args:
            keys: Of the entries.
            place: Makes the tensor for a size and data type. Default: what was read stays where it is.

        Raises:
            CheckpointCorruptError: A file cannot be read.
            UnsafeCheckpointError: A value would run code.
        """
        found: dict[str, Any] = dict.fromkeys(keys)
        by_file: dict[str, list[tuple[int, str]]] = {}
        for key in found:
            name, offset = self.place_of(key)
            by_file.setdefault(name, []).append((offset, key))
        for name, wanted in by_file.items():
            try:
                with (self._folder / name).open("rb") as file:
                    for _, key in sorted(wanted):
                        found[key] = self._entry(file, key, place)
            except OSError as error:
                raise CheckpointCorruptError(
                    f"checkpoint file {self._folder / name} cannot be read: {error}"
                ) from error
        return found

    def _entry(self, file: Any, key: str, place: Place | None) -> Any:
        where = f"entry {key!r} of checkpoint {self._folder}"
        view = self._storage._slice_file(file, self._places[key][0])
        value, entry = load_object(view, where, trust=self._trust), self.entries[key]
        if not isinstance(entry, TensorStorageMetadata):
            return value
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (
            entry.size,
            entry.properties.dtype,
        ):
            raise CheckpointCorruptError(
                f"{where} is not the tensor that {self._folder / '.metadata'} tells of"
            )
        return value if place is None else place(value.shape, value.dtype).copy_(value)
