"""A divisor that is drawn is the sum of what the micro-batches drew."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.split.pipe import Module, Outcome, piped

pytestmark = pytest.mark.usefixtures("float64")


SAMPLES, LENGTH, CLASSES, PARTS = 6, 5, 4, 3
Fraction = tuple[Tensor, Any]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(SAMPLES, LENGTH, 4, generator=generator),
        "target": torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator),
    }


class Drawn(Module):
    """`fraction` gives what is summed and what it is divided by; `whole` is how a user writes their loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, CLASSES))
        self.loss, self.apart = loss, False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        numerator, count = self.loss(self.net(batch["x"]), batch["target"])
        if self.apart:
            return {"loss": numerator, "count": torch.as_tensor(count)}
        loss = numerator / count
        self.log("loss", loss)
        return loss


def each(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target, reduction="none")


def bernoulli(y: Tensor, target: Tensor) -> Fraction:
    mask = torch.bernoulli(torch.full(target.shape, 0.4))
    return (each(y, target) * mask).sum(), mask.sum()


def drawn_before_the_units(y: Tensor, target: Tensor) -> Fraction:
    mask = torch.empty(target.shape).uniform_() < 0.4
    return (each(y, target) * mask).sum(), mask.sum() + 1e-3 * PARTS


def picked(y: Tensor, target: Tensor) -> Fraction:
    mask = torch.rand_like(target.double()) < 0.5
    return each(y, target)[mask].sum(), mask.sum()


def one_number_too(y: Tensor, target: Tensor) -> Fraction:
    weight = torch.rand(())
    mask = torch.rand(target.shape) < 0.4
    return (each(y, target) * mask).sum() * weight, mask.sum()


def of_numpy(y: Tensor, target: Tensor) -> Fraction:
    weight = float(numpy.random.beta(2, 2))
    mask = torch.rand(target.shape) < 0.4
    return weight * (each(y, target) * mask).sum(), mask.sum()


def permuted(y: Tensor, target: Tensor) -> Fraction:
    order = torch.randperm(len(target))
    mask = (target != 2)[order].double()
    return (each(y, target[order]) * mask).sum(), mask.sum()


def seeded_by_the_step(y: Tensor, target: Tensor) -> Fraction:
    torch.manual_seed(5)
    mask = torch.rand(target.shape) < 0.4
    return (each(y, target) * mask).sum(), mask.sum()


def of_one_number_alone(y: Tensor, target: Tensor) -> Fraction:
    """Divided by samples: a number that is drawn once a micro-batch is its own."""
    return each(y, target).sum() * torch.rand(()), target.numel()


def run(loss: Callable[[Tensor, Tensor], Any], *, apart: bool, follow: bool, **options: Any) -> Outcome:
    module = Drawn(loss)
    module.apart = apart
    return piped(module, batch(), 2, PARTS, follow=follow, seed=4, **options)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize(
    "loss",
    [bernoulli, drawn_before_the_units, picked, one_number_too, of_numpy, permuted, seeded_by_the_step,
     of_one_number_alone],
)  # fmt: skip
def test_a_drawn_divisor_is_the_sum_of_those_of_the_micro_batches(
    loss: Callable[[Tensor, Tensor], Any], split_backward: bool
) -> None:
    mine = run(loss, apart=False, follow=True, split_backward=split_backward)
    sums = run(loss, apart=True, follow=False)  # weighted by samples, each a third
    count = sum(output["count"] for output in sums.outputs)
    if loss is drawn_before_the_units:
        count = count - 2 * 1e-3 * PARTS  # added once
    for name, gradient in sums.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient * PARTS / count, rtol=1e-10, atol=1e-12)
    total = sum(sums.losses) / count
    torch.testing.assert_close(mine.loss, total, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mine.logs["loss"], total, rtol=1e-10, atol=1e-12)


def one_sample_at_a_time(y: Tensor, target: Tensor) -> Fraction:
    mask = torch.stack([torch.rand(LENGTH) < 0.4 for _ in target])
    return (each(y, target) * mask).sum(), mask.sum()


def mask_of_numpy(y: Tensor, target: Tensor) -> Fraction:
    mask = torch.from_numpy(numpy.random.rand(*target.shape)) < 0.4
    return (each(y, target) * mask).sum(), mask.sum()


def negatives(y: Tensor, target: Tensor) -> Fraction:
    """Other samples of the batch, by numbers that go by how many there are."""
    mask = (target != 2)[torch.randint(0, len(target), (len(target),))].double()
    return (each(y, target) * mask).sum(), mask.sum()


def drawn_flat(y: Tensor, target: Tensor) -> Fraction:
    mask = (torch.rand(target.numel()) < 0.4).view(LENGTH, len(target)).T
    return (each(y, target) * mask).sum(), mask.sum()


@pytest.mark.parametrize("loss", [one_sample_at_a_time, mask_of_numpy, negatives, drawn_flat])
def test_draws_that_cannot_be_told_apart_by_sample_weigh_by_samples_with_a_warning(
    loss: Callable[[Tensor, Tensor], Any],
) -> None:
    with pytest.warns(UserWarning, match=r"draws random numbers with .*microbatch_weight"):
        mine = run(loss, apart=False, follow=True)
    theirs = run(loss, apart=False, follow=False)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-12, atol=0)
