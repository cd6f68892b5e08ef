"""Files mapped into memory, so that what is staged needs no copy: it lies in the page cache."""

import mmap
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

_POPULATE_READ = 22  # MADV_POPULATE_READ of linux/mman.h, since 5.14; reading fails instead of the process
_BLOCK = 1 << 20


class MappedFile:
    """A file as memory that can only be read, and that the system takes back when it needs it.

    Args:
        file: Open for reading; may be closed later.
        editable: Whether the memory may be changed; the file stays as it is.

    Raises:
        OSError: It cannot be mapped here.
        ValueError: It is empty.
    """

    def __init__(self, file: IO[bytes], *, editable: bool = False) -> None:
        access = mmap.ACCESS_COPY if editable else mmap.ACCESS_READ
        self._memory = mmap.mmap(file.fileno(), 0, access=access)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()

    def fetch(self, file: IO[bytes], start: int, length: int) -> None:
        """Bring a part into memory: a disk that fails does so here, not where the part is used.

        Args:
            file: The same one.
            start: First byte.
            length: In bytes.

        Raises:
            OSError: It cannot be read.
        """
        if sys.platform == "linux":
            first = start - start % mmap.PAGESIZE
            try:
                self._memory.madvise(_POPULATE_READ, first, start + length - first)
                return
            except OSError:  # an older kernel, or a failing disk: `read` says which
                pass
        file.seek(start)
        while length > 0 and (block := file.read(min(length, _BLOCK))):
            length -= len(block)
        if length > 0:
            raise OSError(f"{length} bytes are missing at its end")

    def blocks(self, file: IO[bytes], size: int) -> Iterator[memoryview]:
        """The file in parts of so many bytes, each in memory when it is given.

        Raises:
            OSError: It cannot be read.
        """
        with memoryview(self._memory) as whole:
            for start in range(0, len(whole), size):
                self.fetch(file, start, min(size, len(whole) - start))
                with whole[start : start + size] as block:
                    yield block

    def tensor(self, start: int, like: Tensor) -> Tensor:
        """What lies at a place, without a copy: only to copy from. The file must not be cut meanwhile.

        Args:
            start: Where its storage begins, in bytes.
            like: A tensor of the same shape, strides and data type; without data.

        Raises:
            ValueError: The file ends before it.
        """
        end = start + like.untyped_storage().nbytes()
        if not 0 <= start <= end <= self._bytes.nbytes():
            raise ValueError(f"bytes {start} to {end} of a file of {self._bytes.nbytes()}")
        empty = torch.empty(0, dtype=like.dtype)
        return empty.set_(self._bytes[start:end], like.storage_offset(), like.shape, like.stride())


def stamp(file: Path | IO[bytes]) -> tuple[int, int]:
    """Size in bytes and time of the last change in nanoseconds.

    Raises:
        OSError: It cannot be looked at.
    """
    found = file.stat() if isinstance(file, Path) else os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns
