"""Precision across stages: which plugins work, and clipping by one norm over all of them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.errors import ConfigurationError

_SERVED = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)

ClipByNorm = Callable[[Iterable[Tensor], float], object]


class _GlobalNorm(Precision):
    """The part of a precision plugin that is ours: clipping by the norm of all stages' gradients."""

    pipeline_clip_by_norm: ClipByNorm

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.pipeline_clip_by_norm(self.main_params(optimizer), float(clip_val))


def with_global_norm(plugin: Precision, clip_by_norm: ClipByNorm) -> Precision:
    """Give a plugin clipping by the norm of all stages. The plugin that was handed in stays as it is.

    Args:
        plugin: What Lightning made of `precision=`, or the user's own.
        clip_by_norm: Clips parameters (first argument) to a norm (second argument).

    Returns:
        A copy, of a class with the same name: checkpoints know plugins by it.

    Raises:
        ConfigurationError: A plugin that would be silently wrong with stages.
    """
    _refuse_unserved(plugin)
    kind = type(plugin)
    if not issubclass(kind, _GlobalNorm):
        names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
        kind = type(kind.__name__, (_GlobalNorm, kind), names)
    wrapped = cast(Any, copy.copy(plugin))
    wrapped.__class__ = kind
    wrapped.pipeline_clip_by_norm = clip_by_norm
    return cast(Precision, wrapped)


def _refuse_unserved(plugin: Precision) -> None:
    if getattr(plugin, "scaler", None) is not None:
        raise ConfigurationError(
            "precision='16-mixed' scales the loss, and each stage would decide by itself to skip a step: "
            "use precision='bf16-mixed' or '32-true'"
        )
    own = (kind for kind in type(plugin).__mro__ if kind.__module__.startswith("lightning."))
    kind = next(own, Precision)
    if kind not in _SERVED and not issubclass(kind, _GlobalNorm):
        raise ConfigurationError(
            f"precision plugin {type(plugin).__name__} replaces layers or needs its own strategy, and does "
            f"not work with PipelineStrategy: use one of {', '.join(k.__name__ for k in _SERVED)}"
        )


def global_norm(
    gradients: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, norm_type: float = 2.0
) -> Tensor:
    """The norm of gradients that are spread over ranks.

    Args:
        gradients: This rank's share, each counted by one rank only.
        group: The ranks.
        device: Where the sum travels.
        norm_type: Of the norm; may be `inf`.

    Returns:
        float64 scalar, the same on every rank of the group; inf or nan when any rank's share is.
    """
    norms = [torch.linalg.vector_norm(g.detach(), norm_type, dtype=_wide(g)) for g in gradients]
    total = torch.zeros((), dtype=torch.float64, device=device)
    finite = norm_type != float("inf")
    if norms:
        stacked = torch.stack([norm.to(device, torch.float64) for norm in norms])
        total = stacked.pow(norm_type).sum() if finite else stacked.max()
    dist.all_reduce(total, dist.ReduceOp.SUM if finite else dist.ReduceOp.MAX, group=group)
    return total.pow(1 / norm_type) if finite else total


@contextmanager
def clipping_over_stages(norm_of: Callable[[Sequence[Tensor], float], Tensor]) -> Iterator[None]:
    """Inside, `torch.nn.utils.clip_grad_norm_` goes by the gradients of all stages, as on one device.

    Users call it in hooks around the optimizer step, under whatever name they imported it. All stages run
    these hooks. Could go if torch let one give the norm.

    Args:
        norm_of: The norm over all stages of this rank's gradients, of a type.
    """
    original = clip_grad._get_total_norm

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm = norm_of(gradients, float(norm_type))
        _check_finite(norm, error_if_nonfinite)
        return norm.to(gradients[0].dtype) if gradients else norm

    clip_grad._get_total_norm = total_norm
    try:
        yield
    finally:
        clip_grad._get_total_norm = original


def _check_finite(norm: Tensor, wanted: bool) -> None:
    if wanted and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of the gradients of all stages is {norm.item()}, so it cannot be clipped"
        )


def _wide(gradient: Tensor) -> torch.dtype | None:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None


def clip_to_norm(
    gradients: Iterable[Tensor], norm: Tensor, max_norm: float, *, error_if_nonfinite: bool = False
) -> None:
    """Scale gradients in place so that the norm they belong to is at most `max_norm`, as torch does.

    Args:
        gradients: This rank's gradients.
        norm: Their norm over all ranks.
        max_norm: The largest norm allowed.
        error_if_nonfinite: Raise when the norm is inf or nan; every rank decides from the same number.

    Raises:
        RuntimeError: As `torch.nn.utils.clip_grad_norm_` does.
    """
    _check_finite(norm, error_if_nonfinite)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.detach().mul_(scale.to(gradient.device, gradient.dtype))
