"""Second derivatives through units of several ranks, with manual optimization, are those of one device."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import assert_same, trainer, weights

Ranks = Callable[[int], Pool]


class Critic(nn.Module):
    """With a layer that keeps nothing, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(4, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.sigmoid(self.again(x)) * torch.tanh(self.again(x * x))
        return self.last(x)


class Adversarial(pl.LightningModule):
    """A Wasserstein GAN, whose critic is held to gradients of length one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.kind = kind
        self.generator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.critic = Critic()
        self.double()

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        mix = torch.linspace(0, 1, len(real), dtype=real.dtype)[:, None]
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        score = self.critic(between)
        (slope,) = torch.autograd.grad(
            score, between, torch.ones_like(score), create_graph=True, retain_graph=True
        )
        return ((slope.norm(2, dim=1) - 1) ** 2).mean()

    def of_real(self, real: Tensor, fake: Tensor) -> Tensor:
        """R1: at real samples, of a sum."""
        real = real.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(real).sum(), real, create_graph=True)
        return slope.square().sum(1).mean()

    def of_weights(self, real: Tensor, fake: Tensor) -> Tensor:
        """The length of the gradients of all weights, as in sharpness penalties."""
        loss = self.critic(real).square().mean()
        slopes = torch.autograd.grad(loss, list(self.critic.parameters()), create_graph=True)
        return 0.1 * sum(slope.square().sum() for slope in slopes)

    def of_all_weights(self, real: Tensor, fake: Tensor) -> Tensor:
        """The length of all of them together, in which gradients of every rank have a part."""
        loss = self.critic(real).square().mean()
        slopes = torch.autograd.grad(loss, list(self.critic.parameters()), create_graph=True)
        return 0.1 * torch.cat([slope.flatten() for slope in slopes]).norm()

    def third(self, real: Tensor, fake: Tensor) -> Tensor:
        """A derivative of a derivative of a derivative."""
        real = real.detach().requires_grad_()
        value = self.critic(real).sum()
        for _ in range(2):
            (slope,) = torch.autograd.grad(value, real, create_graph=True)
            value = slope.square().sum()
        return value * 0.01

    def vector(self, real: Tensor, fake: Tensor) -> Tensor:
        """A product with the second derivative, of which no further one is taken."""
        real = real.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(real).square().sum(), real, create_graph=True)
        (product,) = torch.autograd.grad(slope, real, torch.ones_like(slope))
        return (self.critic(real + product)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        real, noise = batch
        fake = self.generator(noise)
        loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
        loss = loss + 10 * getattr(self, self.kind)(real, fake.detach())
        self.manual_backward(loss)
        of_critic.step()
        of_critic.zero_grad()
        self.log("critic", loss)
        if batch_idx % 2:
            loss = -self.critic(self.generator(noise)).mean()
            self.manual_backward(loss)
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()
            self.log("generator", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.02),
            torch.optim.Adam(self.critic.parameters(), lr=0.02, betas=(0.5, 0.9)),
        ]


def fit(kind: str, stages: int | None) -> Any:
    module = Adversarial(kind)
    draws = torch.Generator().manual_seed(5)
    data = [torch.randn(24, width, generator=draws, dtype=torch.float64) for width in (4, 3)]
    run = trainer({"stages": stages, "step_timeout": 20} if stages else None)
    run.fit(module, DataLoader(TensorDataset(*data), batch_size=6))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("kind", ["penalty", "of_real", "of_weights", "of_all_weights", "third", "vector"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_loss_of_gradients_is_that_of_one_device(ranks: Ranks, kind: str, stages: int) -> None:
    expected = fit(kind, None)
    for found in ranks(stages)(fit, kind, stages):
        assert_same(found, expected)
