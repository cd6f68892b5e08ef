"""Note, while tracing, which memory the backward needs: what autograd would keep, in units and between them.

What an activation checkpoint drops is computed again instead.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeline.model.tensors import Tag, Work, stepping_aside, storage_key, top_hooks, work_of
from lightning_pipeline.model.trace.record import Call, Observation
from lightning_pipeline.patching import patched

_aten = torch.ops.aten
# What `deferred.Deferral` reroutes, as it looks below autograd. A plain `x @ weight` is no linear layer.
_DEFERRED = (_aten.addmm, _aten.mm, _aten.convolution, _aten.embedding)


class _Region:
    """A region that is open: what ran in it since its last saved tensor, and the sizes of what it saved.

    `kept` is the memory of it that a selective checkpoint's policy keeps.
    """

    def __init__(self, frame: Any) -> None:
        self.frame = frame
        self.since: list[tuple[Call, Work]] = []
        self.sizes: dict[int, int] = {}
        self.kept: set[int] = set()
        self.latest: tuple[Call, Work] | None = None
        self.calls: list[Call] = []


class Regions:
    """What a backward computes again: of each region all that stands before the last tensor saved in it.

    torch ends a recomputation there, unless `set_checkpoint_early_stop(False)` says otherwise.
    """

    def __init__(self) -> None:
        self._open: list[_Region] = []
        self._seen: list[weakref.ref[Any]] = []

    def operation(self, call: Call, work: Work) -> None:
        """An operation of a unit ran."""
        for region in self._open:
            region.latest = (call, work)
            region.since.append(region.latest)

    def saved(self, number: int | None, size: int) -> None:
        """Autograd keeps a piece of memory, by its number, which a region drops until it is run again."""
        for region in self._open:
            if number is not None:
                region.sizes[number] = size
            self._again(region)

    def keeps(self, number: int | None) -> None:
        """The policy of the innermost region keeps what the last operation made: it does not run again."""
        if self._open:
            region = self._open[-1]
            if number is not None:
                region.kept.add(number)
            if region.since and region.since[-1] is region.latest:  # an operation may have several results
                region.since.pop()
                region.latest = None

    @property
    def open(self) -> bool:
        """Whether code inside a region runs."""
        return bool(self._open)

    @staticmethod
    def _pack_of(hook: Any) -> Callable[[Tensor], Any]:
        pack: Callable[[Tensor], Any] = hook.pack_hook
        return pack

    @staticmethod
    def _again(region: _Region) -> None:
        for call, work in region.since:
            call.recomputed.append(work)
            region.calls.append(call)
        region.since.clear()

    @contextmanager
    def watched(self, number_of: Callable[[Tensor], int | None]) -> Iterator[None]:
        """Notice checkpoints, for the length of a trace.

        Args:
            number_of: Of the memory of a saved tensor; `None` where it is there anyway.
        """
        regions, module = self._open, torch.utils.checkpoint
        kind: Any = module._checkpoint_hook

        class Noted(kind):  # type: ignore[misc]
            def __init__(hook, frame: Any) -> None:
                super().__init__(frame)
                hook.region, pack = _Region(frame), self._pack_of(hook)
                self._seen.append(weakref.ref(frame))

                def noting(tensor: Tensor) -> Any:
                    self.saved(number_of(tensor), tensor.untyped_storage().nbytes())
                    return pack(tensor)

                hook.pack_hook = noting

            def __enter__(hook) -> Any:
                regions.append(hook.region)
                return super().__enter__()

            def __exit__(hook, *error: Any) -> None:
                super().__exit__(*error)
                regions.remove(hook.region)
                if not hook.region.frame.early_stop:
                    self._again(hook.region)
                held = sum(s for number, s in hook.region.sizes.items() if number not in hook.region.kept)
                for call in hook.region.calls:
                    call.recomputed_bytes = max(call.recomputed_bytes, held)

        with patched(module, {"_checkpoint_hook": Noted}):
            try:
                yield
            finally:
                regions.clear()
                self._let_go()

    def _let_go(self) -> None:
        """None runs again after a trace, and its function may hold what was made later, which holds it."""
        for frame in (reference() for reference in self._seen):
            if frame is not None:
                frame.recompute_fn = None
        self._seen.clear()


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
        if not self._observed.costs:
            yield
            return
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
