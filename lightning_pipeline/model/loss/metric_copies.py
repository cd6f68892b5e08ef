"""Copies of metrics, which are asked in the place of these, and of what they are given."""

import copy
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pipeline.model.loss.events import type_of
from lightning_pipeline.model.loss.follower import Part
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


class Kept(NamedTuple):
    """A tensor or a number, and what it is of the batch's."""

    value: Any
    part: Part


def kept(value: Any, part: Callable[[Any], Part] = lambda value: Part()) -> Any:
    """Arguments as they are kept: tensors without their graph, which the step may go on to change."""
    if isinstance(value, Tensor):
        return Kept(value.detach().clone(), part(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Kept(value, part(value))
    if isinstance(value, dict):
        return {key: kept(item, part) for key, item in value.items()}
    return type_of(value)(kept(item, part) for item in value) if isinstance(value, list | tuple) else value


def given(value: Any) -> Any:
    """The arguments themselves."""
    if isinstance(value, Kept):
        return value.value
    if isinstance(value, dict):
        return {key: given(item) for key, item in value.items()}
    return type_of(value)(map(given, value)) if isinstance(value, list | tuple) else value


def are_alike(one: Any, other: Any) -> bool:
    """Whether a metric is given the same in two runs."""
    if isinstance(one, Kept) and isinstance(other, Kept):
        pair = one.value, other.value
        return torch.equal(*pair) if all(isinstance(v, Tensor) for v in pair) else pair[0] == pair[1]
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return type(one) is type(other) and one == other
