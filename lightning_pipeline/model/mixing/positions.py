"""Numbers of rows: those of a batch that a micro-batch is given are none of its own rows."""

from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.tensors import tensors_in

_ALONG = {
    "sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "argmax": 1, "argmin": 1, "max": 1, "min": 1,
    "median": 1, "nanmedian": 1, "mode": 1, "cumsum": 1, "cummax": 1, "cummin": 1, "multinomial": -1,
}  # fmt: skip
"""Functions that count along a dimension, and which argument that is; -1: the last dimension."""
_VALUE = frozenset({"max", "min", "median", "nanmedian"})
"""Those of them that give a value, and no number of anything, where no dimension is said."""
_OF_ALL = frozenset({"argmax", "argmin"})
"""Those that number all elements then."""
_UP_TO = frozenset({"arange", "range", "randperm", "randint", "randint_like", "random_"})
_WHERE = frozenset({"nonzero", "argwhere", "where"})
_CHOOSING = frozenset({"__getitem__", "index_select", "gather", "take", "take_along_dim", "embedding"})
_TO_PYTHON = frozenset(
    {"tolist", "numpy", "__array__", "__iter__", "item", "__index__", "__int__", "__float__", "__bool__"}
)


def lengths(func: Any, args: Any, kwargs: Any) -> frozenset[int]:
    """Of how many things, at most, a function gives the numbers; empty where it gives no numbers of things.

    Args:
        func: The function.
        args: Its arguments.
        kwargs: Likewise.
    """
    name = getattr(func, "__name__", "")
    if name in _UP_TO:
        return frozenset(one for one in (*args, *kwargs.values()) if type(one) is int)
    if not args or not isinstance(args[0], Tensor):
        return frozenset()
    shape = args[0].shape
    if name in _WHERE:
        return frozenset(shape)
    if name not in _ALONG:
        return frozenset()
    place = _ALONG[name]
    along = kwargs.get("dim", kwargs.get("axis", args[place] if 0 < place < len(args) else None))
    if name in _VALUE and type(along) is not int:
        return frozenset()
    if along is None and name not in _OF_ALL:
        along = -1
    return frozenset([shape[along]] if type(along) is int and shape else shape)


class Positions:
    """Which tensors of a run hold numbers of the batch's rows, and must not choose among a micro-batch's."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}
        self._own: dict[int, Tensor] = {}  # those of the micro-batch's rows

    def among(self, given: Any) -> bool:
        """Whether there are some of the batch's rows among these."""
        return any(id(one) in self._held for one in tensors_in(given))

    def leave(self, func: Any, given: Any) -> bool:
        """Whether a call makes numbers of Python of such tensors."""
        return getattr(func, "__name__", "") in _TO_PYTHON and self.among(given)

    def are_all(self, func: Any) -> bool:
        """Whether a function numbers as many things as it is told, in order."""
        return func is torch.arange

    def note(
        self, func: Any, args: Any, kwargs: Any, result: Any,
        *, is_given: bool, writes: bool, numbers: bool,
    ) -> None:  # fmt: skip
        """A call of a function has given this.

        Args:
            func: It.
            args: Its arguments.
            kwargs: Likewise.
            result: What it gave.
            is_given: Whether that is of the batch.
            writes: Whether it has written into its first argument.
            numbers: Whether it gives numbers of samples.
        """
        name = getattr(func, "__name__", "")
        if not is_given and self.are_all(func):
            self._own.update((id(one), one) for one in tensors_in(result))
            return
        by = args[:1] if name in _CHOOSING else (args, kwargs)
        follows = self.among(by) or any(id(one) in self._own for one in tensors_in(by))
        if not follows and not (is_given and numbers):
            return
        made = [args[0]] if writes else list(tensors_in(result))
        if len(made) > 1 and not follows and name in _ALONG:
            made = made[1:]  # the first has values
        for tensor in made:
            if tensor.dtype is not torch.bool and not (tensor.is_floating_point() or tensor.is_complex()):
                self._held[id(tensor)] = tensor  # so that its number is no other's
