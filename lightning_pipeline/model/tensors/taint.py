"""Real tensors that glue wrote a placeholder into: from then on they are placeholders too."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_pipeline._torch import TorchDispatchMode, current_dispatch_mode
from lightning_pipeline.model.tensors.operations import is_placeholder, storage_key
from lightning_pipeline.model.tensors.placeholder import PlaceholderMode
from lightning_pipeline.model.tensors.structure import map_tensors, tensors_in


class Taint:
    """Remembers such tensors for one replay.

    A write of a placeholder into real memory does nothing, without an error. What reads that memory later
    must see a placeholder, so from the first such write on every operation is looked at.

    Args:
        mode: The placeholders' mode.
        on_unit_read: Called where a unit that really runs reads such memory; returns the error.

    Attributes:
        unguarded: Whether `enter` is due.
    """

    def __init__(self, mode: PlaceholderMode, on_unit_read: Callable[[], Exception | None]) -> None:
        self._mode = mode
        self._on_unit_read = on_unit_read
        self._tensors: dict[int, Tensor] = {}  # held, so that no storage's identity is used twice
        self._guard: _Guard | None = None
        self.unguarded = False
        self._outer: Any = None

    def add(self, tensor: Tensor) -> None:
        """Mark the memory behind a real tensor."""
        self._tensors[storage_key(tensor)] = tensor
        self.unguarded = self._guard is None

    def holds(self, value: Any) -> bool:
        """Whether memory of a tensor in `value` is marked."""
        return bool(self._tensors) and any(storage_key(t) in self._tensors for t in tensors_in(value))

    def enter(self) -> bool:
        """Look at every operation from now on; False where a mode of the user's own is in the way."""
        if current_dispatch_mode() is not self._outer:
            return False
        self._guard, self.unguarded = _Guard(self), False
        self._guard.__enter__()  # type: ignore[no-untyped-call]
        return True

    def close(self) -> None:
        """Let go of the marked tensors, when nothing of the replay is read any more."""
        self._tensors, self.unguarded = {}, False

    def __enter__(self) -> None:
        """Begin a step."""
        self._outer = current_dispatch_mode()

    def __exit__(self, *exception: object) -> None:
        """End it, and stop looking."""
        if self._guard is not None:
            self._guard.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._guard, self.unguarded = None, bool(self._tensors)

    def swapped(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The operands of an operation, with a placeholder for each marked tensor."""
        if not self.holds((args, kwargs)):
            return args, kwargs
        error = self._on_unit_read()
        if error is not None:
            raise error
        result: tuple[Any, Any] = map_tensors(self._swap, (args, kwargs))
        return result

    def _swap(self, tensor: Tensor) -> Tensor:
        if is_placeholder(tensor) or storage_key(tensor) not in self._tensors:
            return tensor
        return self._mode.like(tensor.detach())


class _Guard(TorchDispatchMode):
    """Sees every operation once there is marked memory."""

    def __init__(self, poison: Taint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taint = poison

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._taint.swapped(args, kwargs or {})
        return func(*args, **kwargs)
