"""Numbers of a batch that its micro-batches' own add up to, and those that follow from its sizes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.mixing.calls import Seen


def sums_of_parts(whole: Seen, parts: Sequence[Seen]) -> set[int]:
    """Places of sums and numbers, such as counts, that the micro-batches' own add up to.

    What a step makes of one may take the number of samples (`hits / len(y)`), which a micro-batch has of its
    own: so it has its own of these, and what is logged is put together as other means are.

    Args:
        whole: The step's run for the batch.
        parts: For each micro-batch.
    """
    calls = zip(whole.calls, *(part.calls for part in parts), strict=False)
    return {
        place
        for place, (one, *own) in enumerate(calls)
        if _add_up(one.result, [part.result if part.read is None else part.read for part in own])
    }


def goes_by_sizes(whole: Seen, parts: Sequence[Seen]) -> bool:
    """Whether a step reads whole numbers of the batch that are no counts, such as its greatest length.

    Args:
        whole: The step's run for the batch.
        parts: For each micro-batch.
    """
    read = [place for place, one in enumerate(whole.calls) if one.by_batch and type(one.result) is int]
    return bool(set(read) - sums_of_parts(whole, parts))


def _add_up(whole: Any, parts: Sequence[Any]) -> bool:
    if type(whole) in (int, float):
        whole = torch.tensor(whole)
    if not isinstance(whole, Tensor) or whole.dtype is torch.bool or whole.is_complex():
        return False
    alike = [part for part in parts if isinstance(part, Tensor) and part.shape == whole.shape]
    if len(alike) < len(parts) or whole.layout is not torch.strided:
        return False
    return torch.allclose(torch.stack(alike).double().sum(0), whole.to(alike[0].device).double(), rtol=1e-6)
