"""Checksums of files, worked out while they are written or in one pass over them."""

import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, Protocol

from typing_extensions import override

from lightning_pipeline.checkpoint.folder import faults
from lightning_pipeline.checkpoint.folder.mapped import MappedFile
from lightning_pipeline.checkpoint.folder.pace import Pace

_BLOCK = 4 << 20  # read at a time
_WRITTEN = 16 << 20  # written and hashed at a time: each turn may wait for the interpreter's lock
_FAULT_AFTER = 256  # bytes of a shard after which the point `during` comes


class Digest(Protocol):
    """What `hashlib` objects are."""

    def update(self, data: Any, /) -> None:
        """Take in more bytes."""
        ...

    def hexdigest(self) -> str:
        """The checksum of all bytes so far."""
        ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_digest(integrity: str) -> Digest | None:
    """A fresh checksum of a kind; `None` for `off`."""
    if integrity == "off":
        return None
    return _Crc32() if integrity == "crc32" else hashlib.sha256()


def checksum_of(path: Path, integrity: str) -> str:
    """The checksum of a file; empty for `off`.

    Raises:
        OSError: It cannot be read.
    """
    digest = new_digest(integrity)
    if digest is None:
        return ""
    with path.open("rb", buffering=0) as file:
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: IO[bytes]) -> Iterator[memoryview]:
    try:
        memory = MappedFile(file)
    except (OSError, ValueError):  # not every file system maps, and an empty file is not mapped
        block = memoryview(bytearray(_BLOCK))
        while count := file.readinto(block):  # type: ignore[attr-defined]  # a raw file has it
            yield block[:count]
    else:
        yield from memory.blocks(file, _BLOCK)


class HashingStream(io.RawIOBase):
    """A file that is written from start to end, and whose checksum grows with it.

    Args:
        path: New file.
        integrity: Kind of checksum.
        pace: Entered around each piece of work.
    """

    def __init__(self, path: Path, integrity: str, pace: Pace | None = None) -> None:
        self._file, self._pace = path.open("wb"), pace or nullcontext()
        self._digest = new_digest(integrity)
        self.size = 0
        self.error: OSError | None = None

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self.size

    @override
    def fileno(self) -> int:
        return self._file.fileno()

    @override
    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _WRITTEN):
            with self._pace:
                self._write_block(view[start : start + _WRITTEN])
        return view.nbytes

    def _write_block(self, block: memoryview) -> None:
        before = self.size
        try:
            self._file.write(block)
            self.size += block.nbytes
            if before <= _FAULT_AFTER < self.size:
                self._file.flush()
                faults.point("save.shard.during")
        except OSError as error:  # torch would replace it with a text about positions
            self.error = self.error or error
            raise
        if self._digest is not None:
            self._digest.update(block)

    @override
    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    @override
    def close(self) -> None:
        self._file.close()
        super().close()

    def checksum(self) -> str:
        """Of what was written; empty for `off`."""
        return self._digest.hexdigest() if self._digest is not None else ""
