"""Torchmetrics objects: what kinds there are, and copies that are asked in the place of one."""

import copy
from collections import deque
from collections.abc import Container
from typing import Any

import numpy
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassStatScores,
)
from torchmetrics.wrappers import BootStrapper, Running

from lightning_pipeline.model.tensors import refill, tensors_in

AnyMetric = Metric | MetricCollection
METHODS = ("forward", "update", "compute", "reset")
_BY_CALLS = (BaseAggregator, BootStrapper, Running)  # what these hold goes by calls
_HELD = (list, dict, set, deque, numpy.ndarray)
_VALUES = (int, float, complex, str, bytes, tuple, frozenset, torch.Tensor, *_HELD)
_BY_ROWS = (MulticlassStatScores, MulticlassConfusionMatrix, MulticlassExactMatch)
"""Of scores they take the largest of a row. Others of their kind make probabilities of logits where any of
the call is none, and those of images may take a range of values."""


class _OfNoKind(Metric):
    """What all metrics have."""

    def update(self) -> None:
        """It counts nothing."""

    def compute(self) -> None:
        """There is nothing to tell."""


_OF_ALL = {*vars(_OfNoKind()), *METHODS}


def sums_samples(metric: AnyMetric) -> bool:
    """Whether it is the library's, and what it holds is put together of samples in any parts."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    return not any(
        isinstance(part, _BY_CALLS) or not type(part).__module__.startswith("torchmetrics.") for part in parts
    )


def goes_by_call(metric: AnyMetric, arguments: Any) -> bool:
    """Whether what it makes of a sample may follow from the others in the call."""
    kinds = [type(part) for part in metric.modules() if isinstance(part, Metric)]
    scores = any(tensor.is_floating_point() for tensor in tensors_in(arguments))
    return any(
        kind.__module__.startswith("torchmetrics.image.")
        or (
            scores
            and kind.__module__.startswith("torchmetrics.classification.")
            and not issubclass(kind, _BY_ROWS)
        )
        for kind in kinds
    )


def put_back(metric: AnyMetric, copied: AnyMetric) -> None:
    """Let a metric hold what it held when it was copied, in states and in attributes of its class's own."""
    for mine, theirs in zip(metric.modules(), copied.modules(), strict=True):
        if isinstance(mine, Metric):
            own = vars(mine).keys() - _OF_ALL - mine._defaults.keys()
            for name in own - vars(theirs).keys():
                object.__delattr__(mine, name)
            for name in own & vars(theirs).keys():
                value = vars(theirs)[name]
                if isinstance(value, _HELD) and type(value) is type(getattr(mine, name)):
                    refill(getattr(mine, name), value)
                elif value is None or isinstance(value, _VALUES):
                    object.__setattr__(mine, name, value)
            for name in (*mine._defaults, "_update_count", "_computed", "_forward_cache"):
                object.__setattr__(mine, name, getattr(theirs, name))


def copy_of(metric: AnyMetric, patched: Container[int] | None = None) -> Any:
    """A copy with methods of its own: states are copied, networks are not, and it gathers from nobody.

    Args:
        metric: A metric or a collection.
        patched: Identities of metrics whose methods are replaced now; None: of all where some stand.
    """
    shared: dict[int, Any] = {}
    for part in metric.modules():
        group: Any = getattr(part, "process_group", None)
        shared[id(group)] = group
        if not any(isinstance(inner, AnyMetric) for inner in part.modules()):
            shared[id(part)] = part
        elif isinstance(part, Metric):  # of values that had gradients
            held = (one for one in tensors_in(vars(part)) if one.grad_fn is not None)
            shared.update((id(one), one.detach().clone()) for one in held)
    replaced = [
        (part, {name: vars(part).pop(name) for name in METHODS if name in vars(part)})
        for part in metric.modules()
        if patched is None or id(part) in patched
    ]
    try:
        with torch.inference_mode(False):
            made = copy.deepcopy(metric, shared)
    finally:
        for part, methods in replaced:
            vars(part).update(methods)
    for part in made.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = _alone
    return made


def _alone() -> bool:
    """Copies gather from nobody."""
    return False
