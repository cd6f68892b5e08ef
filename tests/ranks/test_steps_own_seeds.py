"""Steps that seed numbers for their samples themselves: each micro-batch begins with the same seed, as told."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.lightning_cases import Regression, loader, trainer


def made(module: Any, x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(4), dtype=x.dtype)


def seeded(module: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return torch.randn_like(x)


def of_all(module: Any, x: Tensor) -> Tensor:
    return torch.randn(x.shape[1], generator=torch.Generator().manual_seed(4), dtype=x.dtype)


def of_torch(module: Any, x: Tensor) -> Tensor:
    return torch.randn_like(x)


def kept(module: Any, x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=module.generator, dtype=x.dtype)


class Noisy(Regression):
    """Adds noise to what it validates."""

    def __init__(self, noise: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.noise, self.generator = noise, torch.Generator().manual_seed(3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x + self.noise(self, x)), y))


@pytest.mark.parametrize(
    ("noise", "number", "is_told"),
    [
        (made, 2, True),
        (seeded, 2, True),
        (made, 1, False),
        (of_all, 2, False),
        (of_torch, 2, False),
        (kept, 2, False),
    ],
)
def test_seeds_of_a_step_for_its_samples_are_told_of(
    noise: Callable[[Any, Tensor], Tensor], number: int, is_told: bool
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer({"stages": 1, "num_microbatches": number}).validate(Noisy(noise), loader())
    texts = [str(one.message) for one in told]
    found = [text for text in texts if "validation_step draws for each sample from a generator" in text]
    assert len(found) == is_told, texts
    assert all("test_steps_own_seeds.py" in text and "on_after_batch_transfer" in text for text in found)
