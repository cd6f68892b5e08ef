"""Activation checkpointing and replay."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline.model.trace.costs import Work
from lightning_pipeline.model.trace.record import Call
from lightning_pipeline.patching import patched

_REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction


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


class ReentrantRegions:
    """Stands in for torch's `CheckpointFunction` while a step is traced or replayed.

    The reentrant kind runs its function without a graph, so what a unit inside returns could not carry a
    gradient across a cut. The other kind computes the same, but for code that asks whether gradients are
    recorded: the tracer looks for such units. Inside a unit nothing is cut. To be deleted when torch drops
    `use_reentrant=True`, as it announces.

    Args:
        inside: Whether a unit runs.
        root: The LightningModule, whose mode code between units may ask for; None where nothing runs again.

    Attributes:
        open: How many regions run now.
        replaced: Whether there was one.
    """

    def __init__(self, inside: Callable[[], Any], root: nn.Module | None) -> None:
        self._inside, self._root, self.open, self.replaced = inside, root, 0, False

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Checkpoint `function(*args)`, between units the non-reentrant way."""
        if self._inside():
            return _REENTRANT.apply(function, preserve, *args)
        if not any(isinstance(value, Tensor) and value.requires_grad for value in args):
            with torch.no_grad():  # as there: torch warns that such a region is not trained
                return function(*args)
        self.open, self.replaced = self.open + 1, True
        called = [] if self._root is None else [self._root]
        before: list[bool] = []

        def in_the_same_modes(*given: Any) -> Any:
            """That kind computes by the modes of the recomputation, this one by the forward's."""
            if before:
                if [module.training for module in called] != before:
                    raise CheckpointError("modes of modules have changed since the forward")
                return function(*given)
            noting = register_module_forward_pre_hook(lambda module, _: called.append(module))
            try:
                return function(*given)
            finally:
                noting.remove()
                before.extend(module.training for module in called)

        try:
            return torch.utils.checkpoint.checkpoint(
                in_the_same_modes, *args, use_reentrant=False, preserve_rng_state=preserve
            )
        finally:
            self.open -= 1


@contextmanager
def reentrant_checkpoint_replaced(
    inside: Callable[[], Any], root: nn.Module | None = None
) -> Iterator[ReentrantRegions]:
    """Run reentrant checkpoints between units as non-reentrant ones.

    Args:
        inside: Whether a unit runs.
        root: The LightningModule, where a backward may run them again.
    """
    regions = ReentrantRegions(inside, root)
    with patched(torch.utils.checkpoint, {"CheckpointFunction": regions}):
        yield regions


class AutogradFunctions:
    """Units that the forward of one autograd function calls, as reversible nets do.

    The function hands out what they compute with a graph of its own, and its backward may run their code
    again: it has to be where they are, and where its output is used.

    Args:
        inside: Whether a unit runs; what is called there is part of that.

    Attributes:
        found: Name of the function, and the units that it called.
    """

    def __init__(self, inside: Callable[[], Any]) -> None:
        self._inside, self.found = inside, list[tuple[str, frozenset[int]]]()
        self._open: list[set[int]] = []

    def note(self, unit: int) -> None:
        """A unit is called."""
        for members in self._open:
            members.add(unit)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice such functions, for the length of a trace."""
        function: Any = torch.autograd.Function
        plain: Any = function.apply.__func__

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside():
                return plain(cls, *args, **kwargs)
            members: set[int] = set()
            self._open.append(members)
            try:
                return plain(cls, *args, **kwargs)
            finally:
                self._open.pop()
                if members:
                    self.found.append((cls.__name__, frozenset(members)))

        with patched(function, {"apply": classmethod(apply)}):
            yield
