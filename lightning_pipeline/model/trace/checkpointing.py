"""Checkpoints of the reentrant kind, and autograd functions that call units."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline.patching import patch, patched

_REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction


class ReentrantRegions(AbstractContextManager["ReentrantRegions"]):
    """Stands in for torch's `CheckpointFunction` while a step is traced or replayed, inside this context.

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

    def __enter__(self) -> "ReentrantRegions":
        self._undo = patch(torch.utils.checkpoint, "CheckpointFunction", self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo()

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


def reentrant_checkpoint_replaced(
    inside: Callable[[], Any], root: nn.Module | None = None
) -> ReentrantRegions:
    """Run reentrant checkpoints between units as non-reentrant ones.

    Args:
        inside: Whether a unit runs.
        root: The LightningModule, where a backward may run them again.
    """
    return ReentrantRegions(inside, root)


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
