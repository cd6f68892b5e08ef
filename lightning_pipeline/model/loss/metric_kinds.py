"""What kinds of torchmetrics objects there are: whether they add up samples, and go by the call."""

from typing import Any

from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassStatScores,
)
from torchmetrics.wrappers import BootStrapper, Running

from lightning_pipeline.model.tensors import tensors_in

AnyMetric = Metric | MetricCollection
_BY_CALLS = (BaseAggregator, BootStrapper, Running)  # what these hold goes by calls
_BY_ROWS = (MulticlassStatScores, MulticlassConfusionMatrix, MulticlassExactMatch)
"""Of scores they take the largest of a row. Others of their kind make probabilities of logits where any of
the call is none, and those of images may take a range of values."""


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
