"""What the cases of `benchmarks/zoo_libraries.py` are made of: the list of them, losses, batches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.model.tensors.structure import map_tensors

Loss = Callable[[nn.Module, Any], Tensor]
Case = tuple[nn.Module, Loss, Callable[[], Any]]
CASES: dict[str, Callable[[], Case]] = {}


def case(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Add a case under `library/name`."""

    def add(function: Callable[[], Case]) -> Callable[[], Case]:
        CASES[name] = function
        return function

    return add


# ---- losses and batches


def classified(model: nn.Module, batch: Any) -> Tensor:
    """Of images and their classes."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def squared(model: nn.Module, batch: Any) -> Tensor:
    """Mean square of everything that a model returns."""
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t) or t, dict(out) if hasattr(out, "keys") else out)  # type: ignore[func-returns-value]
    return torch.stack([t.pow(2).mean() for t in found if t.is_floating_point() and t.requires_grad]).sum()


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """What a model returns as `loss`."""
    loss: Tensor = model(**batch).loss
    return loss


def images(side: int = 64, rows: int = 4, classes: int = 3) -> Callable[[], Any]:
    """Makes images and classes."""
    return lambda: (torch.randn(rows, 3, side, side), torch.randint(0, classes, (rows,)))


def words(rows: int = 2, length: int = 10) -> Any:
    """Makes ids, which are their own labels."""
    ids = torch.randint(5, 90, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
