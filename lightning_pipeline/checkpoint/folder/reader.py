"""Reads parts of a checkpoint in DCP's layout, in one process and without running code of the files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_pipeline.checkpoint.folder.mapped import MappedFile, stamp
from lightning_pipeline.checkpoint.folder.safe import load_object, read_metadata
from lightning_pipeline.errors import CheckpointCorruptError

Place = Callable[[torch.Size, torch.dtype], torch.Tensor]
_WORTH_MAPPING = 1 << 14  # bytes


class Reader:
    """The tensors and values of a checkpoint folder, by key.

    DCP's own `load` copies every tensor from a fresh one into a given one; here the fresh one is what is
    staged, which saves a copy of everything.

    Args:
        folder: The checkpoint. Its files were verified.
        trust: Whether objects of any class may be unpickled.
        stamps: Size and time of change of each file when it was verified; default: not compared.
        editable: Whether tensors that are the file itself may be changed, which does not change the file.

    Raises:
        UnsafeCheckpointError: The list of what lies where would run code or leads outside the folder.
        CheckpointCorruptError: It cannot be read.
    """

    def __init__(
        self, folder: Path, *, trust: bool, stamps: Mapping[str, tuple[int, int]] | None = None,
        editable: bool = False,
    ) -> None:  # fmt: skip
        self._folder, self._trust, self._stamps = folder, trust, stamps or {}
        self._editable = editable
        self._metadata: Metadata = read_metadata(folder, trust=trust)
        self._storage = FileSystemReader(folder)
        self._places: dict[str, list[Any]] = {}
        self._memory: dict[str, MappedFile] = {}
        for index, info in self._metadata.storage_data.items():
            if self._stamps and str(info.relative_path) not in self._stamps:
                raise CheckpointCorruptError(
                    f"checkpoint {folder} names the file {str(info.relative_path)!r}, which its manifest "
                    "does not list, so that nobody has verified it"
                )
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

    def read(
        self, keys: Iterable[str], place: Place | None = None, *, mapped: bool = False
    ) -> dict[str, Any]:
        """Read entries into new memory.

        Args:
            keys: Of the entries.
            place: Makes the tensor for a size and data type, where it is not the file itself. Default: what
                was read stays where it is.
            mapped: Whether large tensors may be the file itself, in memory: only to be copied from.

        Raises:
            CheckpointCorruptError: A file cannot be read, or was changed since it was verified.
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
                    self._compare(name, file)
                    memory = self._mapped(name, file) if mapped else None
                    for _, key in sorted(wanted):
                        found[key] = self._entry(file, key, place, memory)
            except OSError as error:
                raise CheckpointCorruptError(
                    f"checkpoint file {self._folder / name} cannot be read: {error}"
                ) from error
        return found

    def compare_again(self) -> None:
        """Refuse files that were changed while they were read.

        Raises:
            CheckpointCorruptError: With the file.
        """
        for name in self._stamps:
            self._compare(name, self._folder / name)

    def _compare(self, name: str, file: Path | IO[bytes]) -> None:
        try:
            changed = name in self._stamps and stamp(file) != self._stamps[name]
        except OSError as error:
            raise CheckpointCorruptError(
                f"checkpoint file {self._folder / name} cannot be read: {error}"
            ) from error
        if changed:
            raise CheckpointCorruptError(
                f"checkpoint file {self._folder / name} was changed while it was read: let no other program "
                "write there during a load"
            )

    def _entry(self, file: Any, key: str, place: Place | None, memory: MappedFile | None) -> Any:
        where, entry = f"entry {key!r} of checkpoint {self._folder}", self.entries[key]
        if not isinstance(entry, TensorStorageMetadata):
            return load_object(self._view(file, key), where, trust=self._trust)
        in_file = self._in_memory(file, key, where, memory) if memory is not None else None
        value = in_file
        if value is None:
            value = load_object(self._view(file, key), where, trust=self._trust)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (
            entry.size,
            entry.properties.dtype,
        ):
            raise CheckpointCorruptError(
                f"{where} is not the tensor that {self._folder / '.metadata'} tells of"
            )
        if place is None or value is in_file:
            return value
        return place(value.shape, value.dtype).copy_(value)

    def _view(self, file: Any, key: str) -> Any:
        return self._storage._slice_file(file, self._places[key][0])

    def _in_memory(self, file: Any, key: str, where: str, memory: MappedFile) -> torch.Tensor | None:
        """A large dense tensor as part of the mapped file; `None` for all else."""
        place = self._places[key][0]
        if place.length < _WORTH_MAPPING:
            return None
        shape = load_object(self._view(file, key), where, trust=self._trust, place="meta")
        if type(shape) is not torch.Tensor or shape.layout != torch.strided or shape.is_quantized:
            return None
        start = getattr(shape.untyped_storage(), "_checkpoint_offset", None)
        if start is None or shape.untyped_storage().nbytes() == 0:
            return None
        memory.fetch(file, place.offset, place.length)
        try:
            return memory.tensor(place.offset + start, shape)
        except (ValueError, RuntimeError) as error:
            raise CheckpointCorruptError(f"{where} cannot be read: {error}") from error

    def _mapped(self, name: str, file: IO[bytes]) -> MappedFile | None:
        if name not in self._memory:
            try:
                self._memory[name] = MappedFile(file, editable=self._editable)
            except (OSError, ValueError):  # not every file system maps: then it is read
                return None
        return self._memory[name]
