"""The first bytes of every message: what it is, and what it must agree with."""

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

MAGIC = 0x4C50_0002
OPEN, FORWARD, BACKWARD = 1, 2, 3
AGREED, DEVIATES, EMPTY = 0, 1, 2
METADATA_BYTES = 4096

_FIXED = struct.Struct("<IBBxxIIIIIIQI")
_ALIGNMENT = 64


class Header(NamedTuple):
    """Fields of a message header.

    Args:
        magic: Tells our messages, and their version, from anything else.
        kind: `OPEN`, `FORWARD` or `BACKWARD`.
        status: `AGREED`: as expected. `DEVIATES`: metadata and the values follow. `EMPTY`: nothing follows.
        stage: The stage that the message is for.
        microbatch: Index of the micro-batch; the number of them for `OPEN`.
        sequence: Messages sent before on this direction.
        received: Messages that the sender has received on the other direction: their buffers are free.
        checksum: Of the agreed metadata; of plan and signatures for `OPEN`.
        num_tensors: Tensors in the message.
        size: Bytes of pickled metadata.
        copied: Tensors' messages that the sender's device has copied out of the receiver's memory.
    """

    magic: int
    kind: int
    status: int
    stage: int
    microbatch: int
    sequence: int
    received: int
    checksum: int
    num_tensors: int
    size: int
    copied: int = 0


def header_bytes(num_flags: int) -> int:
    """Length of a header that has a flag for each of so many tensors."""
    return -(-(_FIXED.size + (num_flags + 7) // 8) // _ALIGNMENT) * _ALIGNMENT


def write_header(buffer: Tensor, header: Header, missing: Sequence[bool] = ()) -> None:
    """Write a header, and a flag for each gradient that is missing, to the start of a buffer."""
    data = _FIXED.pack(*header)
    if missing:
        bits = sum(1 << index for index, flag in enumerate(missing) if flag)
        data += bits.to_bytes((len(missing) + 7) // 8, "little")
    ctypes.memmove(buffer.data_ptr(), data, len(data))


def read_header(buffer: Tensor) -> Header:
    """Read what `write_header` wrote."""
    return Header._make(_FIXED.unpack(ctypes.string_at(buffer.data_ptr(), _FIXED.size)))


def read_missing(buffer: Tensor, num_flags: int) -> list[bool]:
    """Read which gradients are missing."""
    data = ctypes.string_at(buffer.data_ptr() + _FIXED.size, (num_flags + 7) // 8)
    bits = int.from_bytes(data, "little")
    return [bool(bits >> index & 1) for index in range(num_flags)]


def read_bytes(buffer: Tensor, start: int, size: int) -> bytes:
    """Copy bytes out of a buffer."""
    return ctypes.string_at(buffer.data_ptr() + start, size)


def write_bytes(buffer: Tensor, start: int, data: bytes) -> None:
    """Copy bytes into a buffer."""
    assert start + len(data) <= buffer.numel(), "bytes must fit the buffer they are written to"
    ctypes.memmove(buffer.data_ptr() + start, data, len(data))
