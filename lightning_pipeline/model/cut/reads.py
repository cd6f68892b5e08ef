"""Numbers that a step reads from tensors between units, by which it takes its way."""

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_pipeline.model.cut.ways import NO_CALLS, Route, StageDone
from lightning_pipeline.model.places import holds_noted
from lightning_pipeline.model.trace import is_tensor_read

_NUMBERS = (bool, int, float, complex)
_GIVEN_TO_PYTHON = (*_NUMBERS, list, numpy.ndarray)
_FORM = (
    "size dim ndimension numel nelement stride storage_offset element_size __len__ __hash__ get_device "
    "data_ptr is_floating_point is_complex is_signed is_contiguous is_conj is_neg is_inference "
    "is_same_size is_shared is_pinned is_set_to is_tensor is_coalesced sparse_dim dense_dim has_names "
    "is_distributed can_cast"
)
_OF_FORM = frozenset(
    getattr(owner, name) for owner in (Tensor, torch) for name in _FORM.split() if hasattr(owner, name)
)
"""Functions that tell of a tensor what follows from its form, and not from its values."""


def _not_told() -> None:
    """Nobody asks."""


def _is_getter(func: Any) -> bool:
    """Whether a function reads an attribute, such as `requires_grad`, which is no value."""
    return getattr(func, "__name__", "") == "__get__"


class Reads:
    """The numbers that a step reads from tensors between units, up to where they are known to end.

    Args:
        known: The way by what was read, with None for what is read on the way to the last number.
        key: The first part of its keys.
        answers: Of `Guesses`, where values of units are read and the answers are not the usual ones.

    Attributes:
        values: What was read.
        on_call: Told of each call of a unit.
        on_value: Told where a value of units is read: what the step does from then on may depend on it.
        changes: Tells whether the step has changed anything; asked at each read where no way is known yet.
        changed: Whether it had at the last read.
        tell_all: Whether nothing else was read, such as an array or a random number of Python.
        leads_to: The way that the numbers lead to.
        by_form: Whether all of it follows from sizes and numbers that are not followed themselves.
        failed: A way on which it ends with an error; None where it does not.
        called: What tells the functions that were called from others.
        asks: Whether code has asked whether something holds of values that units compute.
        compares: Whether it has read numbers of them.
        places: Identities of those that it has changed, where it ran to its end.
    """

    def __init__(
        self, known: Mapping[Hashable, Route | None] | None = None, key: Hashable = None,
        answers: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._known, self._key, self.answers = known, key, answers
        self.values: list[Any] = []
        self.changes: Callable[[], bool] = lambda: False
        self.on_call = self.on_value = _not_told
        self.changed = self._is_done = False
        self.tell_all, self.by_form = True, True
        self.failed: Route | None = None
        self.leads_to: Route | None = None
        self.called = NO_CALLS
        self.asks = self.compares = False
        self.places: set[Hashable] | None = None

    def begin(self) -> None:
        """The step begins.

        Raises:
            StageDone: No number is read on the way that is known.
        """
        self._look_up()

    @property
    def collects(self) -> bool:
        """Whether all that is read is wanted, as no way is known by it."""
        return self._known is None

    def flags(self) -> tuple[bool, ...]:
        """What was read that something is decided by."""
        return tuple(value for value in self.values if type(value) is bool)

    def meet(self, func: Any, args: Any, kwargs: Any) -> None:
        """A function of tensors is called between units, which may take numbers where nobody sees it."""
        if self.collects and (is_tensor_read(func) or holds_noted((args, kwargs))):
            self.by_form = False

    def note(self, func: Any, result: Any) -> None:
        """A function of tensors was called between units.

        Args:
            func: The function.
            result: What it gave.

        Raises:
            StageDone: The way is known, or cannot be told so.
        """
        if not isinstance(result, _GIVEN_TO_PYTHON) or func in _OF_FORM or _is_getter(func):
            return
        self.read(result)

    def read(self, result: Any) -> None:
        """A number, or several, were read that values decide.

        Args:
            result: What was.

        Raises:
            StageDone: As by `note`.
        """
        if self._is_done:  # numpy asks for an index, and then for an array
            raise StageDone
        self.tell_all &= isinstance(result, (*_NUMBERS, torch.Size))
        self.values.append(result)
        self.changed = self.changed or self.changes()
        self._look_up()

    def _look_up(self) -> None:
        if self._known is None:
            return
        found = (self._key, tuple(self.values)) if self.tell_all else None
        self.leads_to = None if found is None else self._known.get(found)
        if self.leads_to is not None or found not in self._known:
            self._is_done = True
            raise StageDone
