"""Functions of torch by what they do to numbers that are followed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.mixing import MOVING
from lightning_pipeline.model.tensors import is_placeholder


def functions(*owners_and_names: tuple[Any, str]) -> list[Any]:
    """Those of each owner by these names, as far as it has them."""
    return [
        function
        for owner, names in owners_and_names
        for name in names.split()
        if (function := getattr(owner, name, None)) is not None
    ]


_BOTH = torch, Tensor


def both(names: str) -> list[Any]:
    """Functions by these names and methods of tensors."""
    return functions(*((owner, names) for owner in _BOTH))


_SUMS = "add add_ __add__ __radd__ __iadd__ sub sub_ subtract __sub__ __isub__ rsub __rsub__ neg __neg__"
_PRODUCTS = "mul mul_ multiply __mul__ __rmul__ __imul__ div div_ divide true_divide __truediv__ __itruediv__"
ARITHMETIC = frozenset(both(_SUMS) + both(_PRODUCTS))
SUMS = frozenset(both("add add_ __add__ __radd__ __iadd__"))
IN_PLACE = frozenset(both("add_ __iadd__ sub_ __isub__ mul_ __imul__ div_ __itruediv__"))
_LINEAR_NAMES = (
    "neg negative clone detach to float double half bfloat16 type type_as contiguous reshape view flatten",
    "squeeze unsqueeze cpu cuda nan_to_num __getitem__ __neg__ positive",
)
LINEAR = frozenset(function for names in _LINEAR_NAMES for function in both(names))
_TURNED: list[Any] = [Tensor.T, Tensor.mT, Tensor.H, Tensor.mH]
LINEAR_OF_ONE = frozenset((
    *both(" ".join(MOVING)), *both(" ".join(f"{name}_" for name in MOVING)),
    *both("expand expand_as matmul mm mv __matmul__ __rmatmul__ dot inner vdot"),
    torch.nn.functional.pad, torch.nn.functional.linear, *(one.__get__ for one in _TURNED),
))  # fmt: skip
"""What is linear in one argument, where nothing is made of nothing: of what has no samples of its own."""
JOINING = frozenset(functions((torch, "stack cat hstack concat")))
NUMBERS = frozenset(functions((Tensor, "item __float__")))
READING = frozenset(functions((Tensor, "item tolist numpy __float__ __int__ __index__ __array__")))
ARRAYS = frozenset(functions((Tensor, "numpy __array__")))
TAKING = frozenset(both("clone contiguous detach flatten index_select narrow ravel reshape to __getitem__"))
SELECTING = frozenset(both("masked_select"))
BY_VALUES = frozenset(both("masked_select nonzero unique argwhere"))
PLACES = frozenset(both("nonzero argwhere flatnonzero"))
_WHERE = frozenset(both("where"))
TAKING_ROWS = frozenset(both("index_select"))
REPEATING = frozenset(both("repeat_interleave"))  # by values where these are not numbers
NORMS = frozenset((*both("norm"), torch.linalg.norm, torch.linalg.vector_norm))
_POWERS = frozenset(both("pow __pow__"))
_SQUARES = frozenset(both("square"))
_TIMES = frozenset(both("mul multiply __mul__"))
OF_FORM = frozenset(both("new_zeros new_ones zeros_like ones_like"))
LIKE = frozenset(both("to type_as expand_as view_as reshape_as"))
"""What takes of a second tensor nothing but its form."""
AT_LEAST = frozenset(both("clamp clamp_ clamp_min clamp_min_"))


def order_of(func: Any, args: Any, kwargs: Any) -> float | None:
    """The order of a norm of all elements of a tensor, as of a vector; None of any other."""
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    if func not in NORMS or len(args) > 2 or kwargs.get("dim") is not None or kwargs.get("keepdim"):
        return None
    if order in (None, "fro"):
        return 2.0
    is_matrix = func is torch.linalg.norm and args[0].dim() > 1
    return float(order) if isinstance(order, int | float) and not is_matrix else None


def is_square(func: Any, args: Any) -> bool:
    """Whether a call multiplies a number with itself."""
    if len(args) < 2:
        return func in _SQUARES
    is_two = isinstance(args[1], int | float) and args[1] == 2
    return args[0] is args[1] if func in _TIMES else func in _POWERS and is_two


def gives_places(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function gives the places of what holds in a mask."""
    return func in PLACES or (func in _WHERE and len(args) + len(kwargs) == 1)


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What a function changes in place, by its name."""
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__set__") or name.startswith("__i") or name.removesuffix("__").endswith("_"):
        yield from (arg for arg in args[:1] if isinstance(arg, Tensor))
    if isinstance(kwargs.get("out"), Tensor):
        yield kwargs["out"]


def has_mask(index: Any) -> bool:
    """Whether an index picks by a mask."""
    return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in indices(index))


def indices(index: Any) -> tuple[Any, ...]:
    """What an index is made of."""
    return index if isinstance(index, tuple) else (index,)


def as_indices(index: Any) -> tuple[Any, ...]:
    """Real masks as the numbers of what they pick, from what has a shape and no content."""
    picked: list[Any] = []
    for part in indices(index):
        is_mask = isinstance(part, Tensor) and part.dtype is torch.bool and not is_placeholder(part)
        picked.extend(part.nonzero(as_tuple=True) if is_mask else (part,))
    return tuple(picked)


def values_in(args: Any, kwargs: Any) -> Iterator[Any]:
    """Arguments, and what is in those that are lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
