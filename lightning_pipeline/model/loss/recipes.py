"""What each value between units is made of, told alike in a batch and in its micro-batches.

Two runs of a step may call other functions, where a count or a class that is not there chooses. A call is
the same in both if it makes the same of the same: of what a unit returned, of an argument, of weights.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline._torch import DisableTorchFunction
from lightning_pipeline.model.loss.events import Recipe
from lightning_pipeline.model.loss.functions import values_in, written_by
from lightning_pipeline.model.tensors import tensors_in, version_of

_FUNCTIONS = (
    FunctionType,
    BuiltinFunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
    MethodWrapperType,
)
_PLAIN = (*_FUNCTIONS, type, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout)
_DEEP, _LONG = 4, 1000  # of arguments that are looked into


class Recipes:
    """Notes what the functions of one run of a step make.

    Args:
        held: Takes the tensors that no function between units has made, such as weights. Who compares two
            runs holds them, so that no identity comes twice.
    """

    def __init__(self, held: list[Tensor]) -> None:
        self._held, self._calls = held, Counter[int]()
        self._known: dict[int, tuple[Any, int, Recipe]] = {}  # with the value, likewise

    def begin(self, arguments: Any) -> None:
        """The step is called with these."""
        self._note_all(("argument",), arguments)

    def answered(self, unit: int, output: Any) -> None:
        """A unit has returned this."""
        self._calls[unit] += 1
        self._note_all(("unit", unit, self._calls[unit]), output)

    def of(self, value: Any) -> Recipe:
        """What a value is made of."""
        return self._of(value)

    def forget(self) -> None:
        """Let go of every value that the run has made."""
        self._known.clear()

    def run(self, func: Any, args: Any, kwargs: Any, call: Callable[[Recipe], Any]) -> Any:
        """Run a function, and note what its result is made of.

        Args:
            func: The function.
            args: Of it.
            kwargs: Likewise.
            call: Runs it; told what this call makes.
        """
        recipe = self._of((func, tuple(args), kwargs), _DEEP + 1)
        result = call(recipe)
        for position, written in enumerate(written_by(func, args, kwargs)):
            self._note(written, _digest(("written", position, recipe)) if recipe is not None else None)
        if isinstance(result, Tensor | float):
            self._note(result, recipe)
        elif isinstance(result, tuple | list):
            for position, one in enumerate(result):
                self._note(one, _digest((position, recipe)) if recipe is not None else None)
        return result

    def _note_all(self, place: tuple[Hashable, ...], values: Any) -> None:
        for position, tensor in enumerate(tensors_in(values)):
            self._note(tensor, _digest((*place, position)))

    def _note(self, value: Any, recipe: Recipe) -> None:
        if isinstance(value, Tensor):
            self._known[id(value)] = value, _version(value), recipe
        elif isinstance(value, float):
            self._known[id(value)] = value, 0, recipe

    def _of(self, value: Any, depth: int = _DEEP) -> Recipe:
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, float) and id(value) in self._known:
            return self._known[id(value)][2]
        if isinstance(value, int | float):
            return _digest((type(value).__name__, repr(value)))  # -1 and -2 have one hash
        if isinstance(value, slice):
            return self._of_parts(("slice", value.start, value.stop, value.step), depth)
        if isinstance(value, dict):
            return self._of_parts(("dict", *value, *value.values()), depth)
        if isinstance(value, tuple | list):
            return self._of_parts((type(value).__name__, *value), depth)
        return _digest((type(value).__name__, value)) if isinstance(value, _PLAIN) else None

    def _of_parts(self, parts: Sequence[Any], depth: int) -> Recipe:
        if not depth or len(parts) > _LONG:
            return None
        found = [self._of(one, depth - 1) for one in parts]
        return None if None in found else _digest(tuple(found))

    def _of_tensor(self, tensor: Tensor) -> Recipe:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[2] if known[1] == _version(tensor) else None
        if not _is_leaf(tensor):  # of a graph that nobody is to hold
            return None
        self._held.append(tensor)
        self._note(tensor, _digest(("held", id(tensor))))
        return self._known[id(tensor)][2]


class FoundByRecipe:
    """Knows which values of a micro-batch are made of calls that were found by what they make.

    From the first on, up to the next unit, all are: the micro-batch goes another way than the batch.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, bool]] = {}  # with the value, so that no identity comes twice
        self._has_call, self._has_followed = False, False

    def begin(self) -> None:
        """A unit was called: the places of calls are known again."""
        self._has_call = self._has_followed = False

    def call(self, found: Any, *, followed: bool = False) -> None:
        """A call was looked for by its recipe.

        Args:
            found: What was found; None: nothing.
            followed: Whether its function is one that shares are followed through.
        """
        self._has_call |= found is not None
        self._has_followed |= followed and found is not None

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A function has made this."""
        known = [made for value in values_in(args, kwargs) if (made := self._made.get(id(value))) is not None]
        if not (self._has_call or known):
            return
        is_followed = self._has_followed or any(followed for _, followed in known)
        for value in result if isinstance(result, tuple) else (result, *written_by(func, args, kwargs)):
            if isinstance(value, Tensor | float):
                self._made[id(value)] = value, is_followed

    def made(self, value: Any, *, followed: bool = False) -> bool:
        """Whether a value is made of such a call, or of one whose function is followed."""
        found = self._made.get(id(value))
        return found is not None and (found[1] or not followed)

    def forget(self) -> None:
        """Let go of every value."""
        self._made.clear()


def _version(tensor: Tensor) -> int:
    with DisableTorchFunction():  # nobody is to take it for a function of the step
        return version_of(tensor)


def _is_leaf(tensor: Tensor) -> bool:
    with DisableTorchFunction():
        return tensor.grad_fn is None


def _digest(parts: Hashable) -> int | None:
    try:
        return hash(parts)
    except TypeError:  # such as an object of a class that compares by what it holds
        return None
