"""Logged numbers that are no means over samples are those of the whole batch, not means of its micro-batches'."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional import mean_squared_error, pearson_corrcoef, r2_score

from lightning_pipeline.errors import SplitError
from tests.unit.split.nets import Net, batch_of, seeded
from tests.unit.split.pipe import alone, assert_whole, piped
from tests.whole import chosen

Number = Callable[[Tensor, Tensor], Any]


def f1(out: Tensor, y: Tensor) -> Tensor:
    guess, truth = out > 0, y > 0
    hits = (guess & truth).sum().double()
    precision, recall = hits / guess.sum(), hits / truth.sum()
    return 2 * precision * recall / (precision + recall)


def explained(out: Tensor, y: Tensor) -> Tensor:
    return 1 - ((out - y) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()


def weighted_mean_root(out: Tensor, y: Tensor) -> Tensor:
    w = y.abs()
    return torch.sqrt((w * (out - y) ** 2).sum() / w.sum())


def accuracy_by_class(out: Tensor, y: Tensor) -> Tensor:
    guess, truth = out.argmax(1), y.argmax(1)
    counts = torch.zeros(2, 2, dtype=torch.float64)
    for i in range(2):
        for j in range(2):
            counts[i, j] = ((guess == i) & (truth == j)).sum()
    return (counts.diag() / counts.sum(1).clamp(min=1)).mean()


def doubled_in_place(out: Tensor, y: Tensor) -> Tensor:
    root = F.mse_loss(out, y).sqrt()
    once = root * 1
    root.mul_(2)
    return root + once


NUMBERS: dict[str, Number] = {
    "root": lambda out, y: F.mse_loss(out, y).sqrt(),
    "root as a power": lambda out, y: F.mse_loss(out, y) ** 0.5,
    "root of a sum by hand": lambda out, y: torch.sqrt(((out - y) ** 2).mean()),
    "perplexity": lambda out, y: torch.exp(F.cross_entropy(out, (y[:, 0] > 0).long())),
    "signal to noise": lambda out, y: 10 * torch.log10(1 / F.mse_loss(out, y)),
    "read as a number": lambda out, y: F.mse_loss(out, y).sqrt().item(),
    "product of two": lambda out, y: F.mse_loss(out, y) * F.l1_loss(out, y),
    "quotient of two": lambda out, y: F.mse_loss(out, y) / F.l1_loss(out, y),
    "sum with a root": lambda out, y: 0.5 * F.mse_loss(out, y).sqrt() + F.l1_loss(out, y),
    "of several at once": lambda out, y: torch.stack([F.mse_loss(out, y), F.l1_loss(out, y)]).sqrt().sum(),
    "largest": lambda out, y: (out - y).abs().max(),
    "smallest": lambda out, y: out.min(),
    "f1": f1,
    "weighted root": weighted_mean_root,
    "root of a sum over a size": lambda out, y: ((out - y) ** 2).sum().sqrt() / len(out),
    "root of a sum over a tensor": lambda out, y: (
        ((out - y) ** 2).sum().sqrt() / torch.tensor(float(len(out)))
    ),
    "root over a number of numpy": lambda out, y: ((out - y) ** 2).sum().sqrt() / np.sqrt(len(out)),
    "a slice of sums": lambda out, y: ((out - y) ** 2).mean(0).sqrt()[: len(out)].sum(),
    "adjusted by a size": lambda out, y: 1 - F.mse_loss(out, y).sqrt() * (len(out) - 1) / (len(out) + 3),
    "explained by a spread that is known": explained,
    "accuracy by class": accuracy_by_class,
    "in place": doubled_in_place,
    "largest of each column, with its place": lambda out, y: out.max(0).values.mean(),
    "of rows": lambda out, y: (out.softmax(1) * y).mean() + out.topk(1).values.mean() + out.sort(1)[0].mean(),
    "largest of each column": lambda out, y: out.amax(0).sum(),
    "over the columns": lambda out, y: ((out - y) ** 2).mean(0).sqrt().mean(),
    "without nan": lambda out, y: torch.where(out > 0, out, torch.nan).nanmean(),
    "of torchmetrics": lambda out, y: mean_squared_error(out, y, squared=False),
}


def logging(number: Number) -> type[Net]:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self.head(self.body(self.emb(batch["x"])))
            self.log("number", number(out, batch["y"]))
            return F.mse_loss(out, batch["y"])

    return Logs


SIZES = ((8, 4), (7, 3), (5, 5))
"""Samples and micro-batches: as many in each, more in some, and one in each."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_no_mean_is_that_of_the_whole_batch(name: str) -> None:
    module = seeded(logging(NUMBERS[name]))
    for size, number in SIZES if name in ("root", "f1", "largest") else chosen(SIZES, 1):
        assert_whole(module, batch_of(size), num_microbatches=number)


@pytest.mark.parametrize("name", ["root", "f1", "largest"])
def test_it_is_in_every_batch(name: str) -> None:
    """The first one shows that the loss is a plain mean, so that the others need not be looked at for it."""
    module = seeded(logging(NUMBERS[name]))

    def each(mine: Any, step: int) -> Any:
        return batch_of(8, seed=step)

    found = piped(module, batch_of(8), num_microbatches=4, steps=3, follow=True, each=each)
    one = seeded(logging(NUMBERS[name]))
    one.training_step(batch_of(8, seed=2), 0)
    torch.testing.assert_close(found.logs["number"], one.logged[-1][1].double())


def test_a_loss_that_is_no_mean_is_warned_of() -> None:
    class Root(Net):
        def loss(self, h: Tensor, batch: Any) -> Tensor:
            return super().loss(h, batch).sqrt()

    with pytest.warns(UserWarning, match="in another way than by adding up"):
        piped(seeded(Root), batch_of(8), num_microbatches=4, follow=True)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_plain_loss_is_not(factor: float) -> None:
    class Plain(Net):
        def loss(self, h: Tensor, batch: Any) -> Tensor:
            first = F.mse_loss(self.head(h), batch["y"])
            return factor * first + 0.1 * h.abs().mean() / 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piped(seeded(Plain), batch_of(8), num_microbatches=4, follow=True)


UNKNOWN: list[Number] = [
    lambda out, y: out.std(),
    lambda out, y: 2 * out.median(),
    lambda out, y: pearson_corrcoef(out[:, 0], y[:, 0]),
    lambda out, y: out.std(0).mean(),
    lambda out, y: out.std(0).max(),
    lambda out, y: torch.quantile(out, 0.5),
    lambda out, y: (out @ out.T).mean(),
    lambda out, y: (out @ out.T).max(),
    lambda out, y: (out.softmax(0) * y).mean(),
    lambda out, y: F.log_softmax(out, dim=0).mean(),
    lambda out, y: out[:, 0].topk(1).values.mean(),
    lambda out, y: out.sort(0).values[:1].mean(),
    lambda out, y: out.median(0).values.sum(),
    lambda out, y: out[:, 0].cumsum(0).mean(),
    lambda out, y: (out - out.flip(0)).abs().mean(),
    lambda out, y: torch.var_mean(out, 0)[0].mean(),
    lambda out, y: F.normalize(out, dim=0).mean(),
    lambda out, y: torch.linalg.svdvals(out).max(),
    lambda out, y: out[0, 0],
]


def test_what_nothing_puts_together_says_so() -> None:
    for number in UNKNOWN:
        with pytest.raises(SplitError, match="would be guessed"):
            piped(seeded(logging(number)), batch_of(8), num_microbatches=4, follow=True)


def test_quotients_of_a_library_are_those_of_the_batch() -> None:
    assert_whole(
        seeded(logging(lambda out, y: r2_score(out[:, 0], y[:, 0]))), batch_of(8), num_microbatches=4
    )


@pytest.mark.parametrize("given", ["attribute", "batch", "index"])
def test_a_weight_that_changes_is_that_of_its_batch(given: str) -> None:
    """What is known of shapes is kept for the next batch; a number between units is none of that."""

    class Annealed(Net):
        weight = 0.1

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self.head(self.body(self.emb(batch["x"])))
            weights = {"attribute": self.weight, "batch": batch["weight"], "index": 0.1 * (1 + batch_idx)}
            self.log("root", F.mse_loss(out, batch["y"]).sqrt())
            self.log("term", weights[given] * out.abs().mean() + 0.5 * self.weight)
            return F.mse_loss(out, batch["y"]) + weights[given] * out.abs().mean()

    def each(module: Any, step: int) -> Any:
        module.weight = 0.1 * (1 + step)
        return {**batch_of(8, seed=step), "weight": 0.1 * (1 + step)}

    module = seeded(Annealed)
    found = piped(module, each(module, 0), num_microbatches=4, steps=3, follow=True, each=each)
    one = alone(module, each(module, 0), num_microbatches=1, steps=3, each=each)
    torch.testing.assert_close(found.loss, one.losses[-1])
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)
    for _, name, value in one.logged[-2:]:
        torch.testing.assert_close(found.logs[name], value)


def test_a_loss_of_pairs_of_samples_is_the_mean_of_the_micro_batches_and_says_so() -> None:
    class Pairs(Net):
        def loss(self, h: Tensor, batch: Any) -> Tensor:
            out = self.head(h)
            pairs = out @ out.T
            return (
                pairs.mean()
                + F.mse_loss(pairs, batch["y"] @ batch["y"].T)
                + (out - batch["y"]).norm() / len(out)
            )

    module = seeded(Pairs)
    with pytest.warns(UserWarning, match="in another way than by adding up"):
        found = piped(module, batch_of(8), num_microbatches=4, follow=True)
    for name, gradient in alone(module, batch_of(8), num_microbatches=4).gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)
