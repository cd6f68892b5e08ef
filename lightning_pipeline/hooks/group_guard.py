"""Norms over an optimizer's groups in hooks around a step: they are those of one stage, so they raise."""

import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, SupportsIndex

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import named_function, user_line

# Code that goes over a group and is right with a part of it, or is made to be: clipping has a global norm.
_ALLOWED = (
    "lightning.",
    "lightning_pipeline.",
    "torch.amp.",
    "torch.cuda.amp.",
    "torch.nn.utils.clip_grad",
    "torch.optim.",
)

# What puts a number together from several parameters, or decides by one of them, uses a name of these.
_REDUCES = frozenset({
    "all", "any", "cat", "count_nonzero", "dot", "get_total_norm", "isfinite", "isinf", "isnan",
    "matrix_norm", "max", "mean", "min", "norm", "numel", "pow", "square", "stack", "std", "sum", "var",
    "vector_norm",
})  # fmt: skip


class GroupGuard:
    """Guards `group["params"]` of optimizers, where a norm over them would be one stage's.

    Optimizers go over their own groups undisturbed, and so does code that changes or copies each gradient by
    itself: a function that names nothing which puts several numbers together.

    Args:
        root: The LightningModule.
        active: Whether a step, or a hook around one, runs.
    """

    def __init__(self, root: nn.Module, active: Callable[[], bool]) -> None:
        self._root, self._active = root, active

    def install(self, optimizers: Iterable[Optimizer]) -> None:
        """Guard all groups, also those added since the last time."""
        for group in _groups(optimizers):
            if type(group["params"]) is list:
                group["params"] = _Guarded(group["params"], self)

    def remove(self, optimizers: Iterable[Optimizer]) -> None:
        """Give the groups plain lists again."""
        for group in _groups(optimizers):
            if isinstance(group["params"], _Guarded):
                group["params"] = group["params"].plain()

    def check(self, frame: FrameType) -> None:
        """Refuse the user's code.

        Args:
            frame: That asks for parameters.

        Raises:
            SplitError: In a hook around a step, outside of an optimizer, by code that puts numbers together.
        """
        if not self._active() or f"{frame.f_globals.get('__name__', '')}.".startswith(_ALLOWED):
            return
        code = named_function(frame).f_code
        if _in_optimizer(frame) or _only_clips(code) or _REDUCES.isdisjoint(_names(code)):
            return
        raise SplitError(
            'group["params"] of an optimizer lists this stage\'s parameters only, and is used inside a step '
            "or a hook around it, for a norm or the like. For clipping use Trainer(gradient_clip_val=...) or "
            "clip_grad_norm_(self.parameters(), ...), for norms Lightning's grad_norm(self, ...), which are "
            "the whole model's; for what is done to each parameter by itself, "
            "self.trainer.strategy.own_parameters() [at "
            f"{user_line(self._root)}]"
        )


def _groups(optimizers: Iterable[Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer.param_groups


def _in_optimizer(frame: FrameType | None) -> bool:
    """Whether an optimizer's own method runs; above Lightning's frames is the one that called the hook."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("lightning."):
        first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ("self",)
        if isinstance(frame.f_locals.get(*first), Optimizer):
            return True
        frame = frame.f_back
    return False


def _only_clips(code: CodeType) -> bool:
    """Whether a function hands parameters to torch's clipping, and looks at no gradient itself."""
    names = set(_names(code))
    return bool(names & {"clip_grad_norm_", "clip_grad_value_"}) and not names & {"grad", "norm"}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):  # comprehensions
            yield from _names(part)


class _Guarded(list[Tensor]):
    """The parameters of a group."""

    def __init__(self, parameters: Iterable[Tensor], guard: GroupGuard) -> None:
        super().__init__(parameters)
        self._guard = guard

    def plain(self) -> list[Tensor]:
        """Without guard."""
        return list(super().__iter__())

    def __iter__(self) -> Iterator[Tensor]:
        self._guard.check(sys._getframe(1))
        return super().__iter__()

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self._guard.check(sys._getframe(1))
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        self._guard.check(sys._getframe(1))
        return super().__add__(other)

    def copy(self) -> list[Tensor]:
        """A plain list."""
        self._guard.check(sys._getframe(1))
        return self.plain()

    def __reduce__(self) -> Any:
        return list, (self.plain(),)
