"""Precision across stages: which plugins work, and what they ask all of the stages."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.hooks.optimizers import own_groups

_SERVED = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)

ClipByNorm = Callable[[Iterable[Tensor], float], object]
Backward = Callable[[Tensor, Callable[[Tensor], None]], None]


class _OfStages(Precision):
    """The part of a precision plugin that is ours: the backward, which the step has run, and clipping."""

    pipeline_clip_by_norm: ClipByNorm
    pipeline_backward: Backward

    @override
    def __reduce__(self) -> Any:
        plain = next(kind for kind in type(self).__mro__[1:] if kind is not _OfStages)
        return _blank, (plain,), dict(vars(self))

    @override
    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        def run(loss: Tensor) -> None:
            super(_OfStages, self).backward(loss, model, optimizer, *args, **kwargs)

        self.pipeline_backward(tensor, run)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.pipeline_clip_by_norm(self.main_params(optimizer), float(clip_val))


def of_stages(plugin: Precision, clip_by_norm: ClipByNorm, backward: Backward) -> Precision:
    """Give a plugin our backward, and clipping by the norm of all stages. The one handed in stays as it is.

    Args:
        plugin: What Lightning made of `precision=`, or the user's own.
        clip_by_norm: Clips parameters (first argument) to a norm (second argument).
        backward: Given a loss and what Lightning would do with it. Gives `.grad` what the step has made.

    Returns:
        A copy, of a class with the same name: checkpoints know plugins by it.

    Raises:
        ConfigurationError: A plugin that would be silently wrong with stages.
    """
    _refuse_unserved(plugin)
    kind = type(plugin)
    wrapped: Any = _blank(kind) if not issubclass(kind, _OfStages) else object.__new__(kind)
    vars(wrapped).update(vars(plugin))
    wrapped.pipeline_clip_by_norm, wrapped.pipeline_backward = clip_by_norm, backward
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        wrapped.scaler = _of_all_stages(scaler)
    return cast(Precision, wrapped)


class _StageScaler(ShardedGradScaler):
    """Goes over the gradients that are here; the groups list the whole model."""

    def unscale_(self, optimizer: Optimizer) -> None:
        with own_groups(optimizer):
            super().unscale_(optimizer)


def _of_all_stages(scaler: GradScaler) -> ShardedGradScaler:
    """A scaler in the state of this one; `join_scaler` gives it the ranks that it asks."""
    made = _StageScaler(scaler._device, enabled=scaler.is_enabled(), process_group=None)
    if scaler.is_enabled():
        made.load_state_dict(scaler.state_dict())
    return made


def join_scaler(plugin: Precision, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor] | None:
    """Let the gradient scaler of a plugin skip a step where any stage has found inf or nan.

    Args:
        plugin: From `of_stages`.
        group: The ranks of a pipeline, for tensors on its devices.

    Returns:
        What scales a loss; None without a scaler.
    """
    scaler = getattr(plugin, "scaler", None)
    if not isinstance(scaler, ShardedGradScaler) or not scaler.is_enabled():
        return None
    scaler.process_group = group
    return scaler.scale


def _blank(kind: type[Precision]) -> Any:
    """An instance without attributes of a plugin's class with our part."""
    names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
    ours = type(kind.__name__, (_OfStages, kind), names)
    return object.__new__(ours)


def _refuse_unserved(plugin: Precision) -> None:
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and type(scaler) not in (
        GradScaler,
        torch.cuda.amp.GradScaler,
        ShardedGradScaler,
        _StageScaler,
    ):
        raise ConfigurationError(
            f"a gradient scaler of class {type(scaler).__name__} decides on one stage's gradients alone "
            "whether a step is skipped: give the precision plugin a torch.amp.GradScaler"
        )
    own = (kind for kind in type(plugin).__mro__ if kind.__module__.startswith("lightning."))
    kind = next(own, Precision)
    if kind not in _SERVED and not issubclass(kind, _OfStages):
        raise ConfigurationError(
            f"precision plugin {type(plugin).__name__} replaces layers or needs its own strategy, and does "
            f"not work with PipelineStrategy: use one of {', '.join(k.__name__ for k in _SERVED)}"
        )
