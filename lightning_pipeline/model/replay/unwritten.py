"""What belongs to a tensor until something is written into it."""

from typing import Any
from weakref import ref

from torch import Tensor


class Unwritten:
    """Tensors with what belongs to them, for as long as they live and nothing is written into them."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[ref[Tensor], int, Any]] = {}

    def add(self, tensor: Tensor, belongs: Any) -> None:
        """Know one; those of inference mode have no gradients that hooks could be for."""
        if tensor.is_inference():
            return
        self._all[id(tensor)] = ref(tensor), tensor._version, belongs

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether this very tensor is known, and not one at the same place in memory."""
        found = self._all.get(id(tensor))
        return found is not None and found[0]() is tensor and found[1] == tensor._version

    def of(self, tensor: Tensor) -> Any:
        """What belongs to one that is known."""
        return self._all[id(tensor)][2]

    def clear(self) -> None:
        """Let go of what belongs to them."""
        self._all.clear()
