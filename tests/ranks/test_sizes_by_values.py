"""What a step counts of what layers gave: other ranks have what it leaves and returns after such a line, too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
Made = Callable[[Tensor, Tensor], Any]


def counts(out: Tensor, classes: Tensor) -> Any:
    return torch.bincount(out.argmax(1), minlength=3)


def weighed(out: Tensor, classes: Tensor) -> Any:
    return torch.bincount(classes, weights=out[:, 0], minlength=3)


def different(out: Tensor, classes: Tensor) -> Any:
    rows, numbers = (out > 0).long().unique(dim=0, return_counts=True)
    return len(rows), numbers.max()


def runs(out: Tensor, classes: Tensor) -> Any:
    return out.argmax(1).unique_consecutive(return_counts=True)[1].sum()


def alike(out: Tensor, classes: Tensor) -> Any:
    return torch.allclose(out, 1e-9 * out), torch.equal(out.argmax(1), classes)


def sparse(out: Tensor, classes: Tensor) -> Any:
    return (out > 0).to_sparse().values().sum()


MADE = [counts, weighed, different, runs, alike, sparse]


class Counts(Regression):
    """A confusion matrix in a plain tensor, which is no buffer."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made, self.matrix = made, torch.zeros(3, 3, dtype=torch.long)

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        out = self.net(batch[0])
        return {
            "loss": mse_loss(out, batch[1]),
            "made": self.made(out.detach(), batch[1].argmax(1)),
            "n": len(out),
        }

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pairs = 3 * self.net(batch[0]).argmax(1) + batch[1].argmax(1)
        self.matrix += torch.bincount(pairs, minlength=9).view(3, 3)

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.matrix.trace() / self.matrix.sum())
        self.matrix.zero_()


class Keeps(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        made = outputs["made"] if isinstance(outputs["made"], tuple) else [outputs["made"]]
        self.seen += [outputs["n"], *(torch.as_tensor(one).tolist() for one in made)]

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(float(trainer.callback_metrics.get("accuracy", -1)))


def counted(pipeline: dict[str, Any] | None) -> list[list[Any]]:
    found = []
    for made in MADE:
        keeps = Keeps()
        trainer(pipeline, max_epochs=1, callbacks=[keeps]).fit(Counts(made), loader(), loader(seed=4))
        found.append(keeps.seen)
    return found


def test_every_rank_has_what_a_step_counts(ranks: Ranks) -> None:
    expected = counted(None)
    for found in ranks(2)(counted, {"stages": 2, "num_microbatches": 2}):
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert mine == pytest.approx(theirs)
