"""Copies of metrics, which are asked in the place of these."""

import copy
from collections.abc import Container
from typing import Any

import torch
from torchmetrics import Metric

from lightning_pipeline.model.loss.metric_kinds import AnyMetric

METHODS = ("forward", "update", "compute", "reset")


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
