"""Buffers that a unit advances once for each run, whatever it is given: in a batch they advance once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Held = tuple[dict[str, Any], str]
"""The buffers of a module, and a name among them."""


class BufferStarts:
    """Lets every micro-batch of a stage begin with what stood there when the batch began.

    After the first forward of the batch these buffers are what they are after one forward of all of it, and
    after every other one again. A backward, in which regions of checkpointing run again, begins from there.

    Args:
        held: The buffers.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._start, self._end = self._values(), list[_Value]()

    def before(self) -> None:
        """A micro-batch begins its forward."""
        if self._end:
            self._put(self._start)

    def after(self) -> None:
        """It has ended."""
        if not self._end:
            self._end = self._values()

    def backward(self) -> None:
        """A micro-batch begins its backward."""
        self._put(self._end)

    def _values(self) -> list["_Value"]:
        return [_Value(buffers[name]) for buffers, name in self._held]

    def _put(self, values: Sequence["_Value"]) -> None:
        for (buffers, name), value in zip(self._held, values, strict=True):
            value.restore()
            buffers[name] = value.tensor


class _Value:
    """What stood in a buffer: the tensor, and what was in it. It is written only where others have.

    Args:
        tensor: That stands there.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._value, self._version = tensor, tensor.detach().clone(), _version(tensor)

    def restore(self) -> None:
        """The tensor has that again."""
        if self._version is None or _version(self.tensor) != self._version:
            with torch.no_grad():
                self.tensor.copy_(self._value)
            self._version = _version(self.tensor)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
