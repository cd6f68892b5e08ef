"""Note, while tracing, which memory autograd would keep for the backward, in units and between them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeline.model.tensors import Tag, stepping_aside, storage_key, top_hooks
from lightning_pipeline.model.trace.checkpointing import Regions
from lightning_pipeline.model.trace.costs import Work, work_of
from lightning_pipeline.model.trace.record import Call, Observation

_aten = torch.ops.aten
# What `deferred.Deferral` reroutes, as it looks below autograd. A plain `x @ weight` is no linear layer.
_DEFERRED = (_aten.addmm, _aten.mm, _aten.convolution, _aten.embedding)


class SavedActivations:
    """Gives each piece of memory a number, and notes who keeps it.

    What code between units keeps is kept by every stage on which its result is used. So the result is
    tagged, and who reads the tag keeps the memory.
    """

    def __init__(self, observed: Observation, regions: Regions) -> None:
        self._observed, self._regions = observed, regions
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}  # the reference keeps the address taken
        self._waiting: set[Tag] = set()
        self._last: set[int] = set()
        self._packing = False
        self._hooks: saved_tensors_hooks | None = None

    # ---- memory

    def number_of(self, tensor: Tensor) -> int:
        """The number of the memory behind a tensor."""
        key = storage_key(tensor)
        if key not in self._numbers:
            storage = tensor.untyped_storage()
            number = len(self._numbers)
            self._numbers[key] = StorageWeakRef(storage), number
            self._observed.trace.sizes[number] = storage.nbytes()
        return self._numbers[key][1]

    def _counts(self, origin: Tensor) -> bool:
        """Whether this is neither a parameter or buffer nor the batch, which are there anyway."""
        return not self._observed.is_state(origin) and not self._observed.batch.of(origin)

    def dropped(self, tensor: Tensor) -> int | None:
        """The number of memory that a checkpoint drops; None for what is there anyway."""
        origin = self._observed.origin(tensor)
        if not self._counts(origin):
            return None
        number = self.number_of(origin)
        return None if number in self._observed.trace.handed.values() else number

    def kept_by_policy(self, tensor: Tensor) -> None:
        """A selective checkpoint keeps what the last operation made, whatever autograd does with it."""
        origin = self._observed.origin(tensor)
        self._regions.keeps(self.dropped(tensor))
        if not self._counts(origin):
            return
        call = self._observed.inside
        if call is None:
            self._observed.tags.add(origin, frozenset({Tag("saved", self.number_of(origin))}))
        else:
            self._add(call, self.number_of(origin))

    def _add(self, call: Call, number: int) -> None:
        if number not in call.saved:
            call.saved.add(number)
            call.activation_bytes += self._observed.trace.sizes[number]

    def work_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
        """What an operation computes and moves, and whether parameters are in it."""
        origins = [self._observed.origin(value) for value in args if isinstance(value, Tensor)]
        states = [origin for origin in origins if self._observed.is_state(origin)]
        weighs = any(map(_needs_gradient, states))
        return work_of(func, args, kwargs, result, weighs=weighs, stated=bool(states))

    # ---- in a unit

    @contextmanager
    def in_unit(self, call: Call) -> Iterator[None]:
        """Note what a unit's forward saves; under hooks of the user's, such as checkpointing, nothing."""
        top = top_hooks()
        counts = self._hooks is not None and top is not None and top[0] is self._hooks.pack_hook

        def keep(tensor: Tensor) -> Tensor:
            origin = self._observed.origin(tensor)
            if self._regions.open:
                self._regions.saved(self.dropped(tensor), origin.untyped_storage().nbytes())
            if counts and self._counts(origin):
                self._add(call, self.number_of(origin))
            return tensor.detach()  # itself would close a circle: an output saved by its own graph

        with stepping_aside(saved_tensors_hooks(keep, lambda tensor: tensor)):
            yield

    def operation_in_unit(self, call: Call, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note what the weight half of a split backward would need of one operation."""
        packet = getattr(func, "overloadpacket", func)
        if packet not in _DEFERRED or not isinstance(result, Tensor):
            return
        operands = [value for value in args if isinstance(value, Tensor)]
        factors = operands[-2:] if packet is _aten.addmm else operands[:2]
        weights = [t for t in factors if self._observed.is_state(self._observed.origin(t))]
        if not weights or (packet is _aten.mm and weights[0].is_contiguous()):
            return
        if any(_needs_gradient(self._observed.origin(weight)) for weight in weights):
            call.deferred_gradients += result.numel() * result.element_size()
            origins = map(self._observed.origin, factors)
            call.deferred |= {self.number_of(origin) for origin in origins if self._counts(origin)}

    # ---- between units

    @contextmanager
    def in_glue(self) -> Iterator[None]:
        """Note what the code between units saves, for the length of the step."""
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with stepping_aside(self._hooks):
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        origin = self._observed.origin(tensor)
        if self._counts(origin):
            tag = Tag("saved", self.number_of(origin))
            if storage_key(origin) in self._last:  # an output, or at once the input of the next operation
                self._observed.tags.add(origin, frozenset({tag}))
            else:
                self._waiting.add(tag)
        self._packing = True
        try:
            return tensor.detach()
        finally:
            self._packing = False

    def take_waiting(self) -> set[Tag]:
        """What was saved for the operation, or the call of a unit, that comes now."""
        waiting, self._waiting = self._waiting, set()
        return waiting

    @property
    def is_packing(self) -> bool:
        """Whether an operation is our own, not the user's."""
        return self._packing

    def operation_in_glue(self, results: Iterable[Tensor]) -> None:
        """An operation between units has run: its results stand for what was saved for it."""
        results = list(results)
        self._last = {storage_key(result) for result in results}
        tags = frozenset(self.take_waiting())
        if tags:
            for result in results:
                self._observed.tags.add(result, tags)


def _needs_gradient(weight: Tensor) -> bool:
    base = weight._base if weight._base is not None else weight
    return base.requires_grad
