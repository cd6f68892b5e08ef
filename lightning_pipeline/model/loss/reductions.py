"""torch's own losses: how they reduce, and what their mean divides by."""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline._torch import legacy_get_string
from lightning_pipeline.model.tensors import is_placeholder

_NAMES = (
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss",
    "gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss",
    "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss",
    "smooth_l1_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss",
)
LOSSES: frozenset[Any] = frozenset(getattr(F, name) for line in _NAMES for name in line.split())
_OVER_CLASSES = (F.cross_entropy, F.nll_loss)
_BY_WEIGHTS = (F.mse_loss, F.l1_loss)  # their mean divides by what `weight` sums up to
_SIGNATURES = {function: inspect.signature(function) for function in LOSSES}


class LossCall(NamedTuple):
    """How a loss was called."""

    reduction: str
    target: Any = None
    weight: Tensor | None = None
    ignore_index: int = -100


def reduction_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall:
    """Read the arguments of one of `LOSSES`."""
    bound = _SIGNATURES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reduction = given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = legacy_get_string(given["size_average"], given["reduce"], emit_warning=False)
    if func in _BY_WEIGHTS:
        return LossCall(reduction, given["target"], given["weight"])
    if func not in _OVER_CLASSES:
        return LossCall(reduction)
    return LossCall(reduction, given["target"], given["weight"], given["ignore_index"])


def read_together(*numbers: Tensor) -> list[float]:
    """The values of 0-dim tensors of one device, for which the host waits once."""
    return torch.stack([number.double() for number in numbers]).tolist()


def valid_targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the mean of a loss divides by, 0-dim; None where that is a number of elements.

    Targets and weights that units compute have no values yet: then the answer is None as well.
    """
    if func not in _OVER_CLASSES + _BY_WEIGHTS:
        return None
    call = reduction_of(func, args, kwargs)
    if func in _BY_WEIGHTS:
        known = call.reduction == "mean" and call.weight is not None and not is_placeholder(call.weight)
        return call.weight.detach().sum() if known and call.weight is not None else None
    target = call.target
    if call.reduction != "mean" or target.is_floating_point() or is_placeholder(target):
        return None
    valid = target != call.ignore_index
    if call.weight is not None and is_placeholder(call.weight):
        return None
    weights = 1 if call.weight is None else call.weight.detach()[torch.where(valid, target, 0)]
    count = (weights * valid).sum()
    return None if is_placeholder(count) else count  # what units compute was written into the targets
