"""Steps that no pipeline can run: every rank runs them whole, and the result is that of one device."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Notes(nn.Linear):
    """Keeps something beside its output."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.largest = out.abs().max()
        return out


class LooksInside(Regression):
    """Its validation branches on a value of a layer before it calls the next one."""

    def __init__(self) -> None:
        super().__init__()
        for number in (2, 6):
            self.net[number].__class__ = Notes

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net[0](batch[0])
        out = self.net[2:](hidden if hidden.sum() > 0 else -hidden)
        self.log("largest", self.net[2].largest + self.net[-1].largest)
        self.error.update(out, batch[1])
        self.log("val_error", self.error)
        self.log("val_loss", nn.functional.mse_loss(out, batch[1]))


@pytest.mark.parametrize("stages", [2, 3])
def test_a_validation_that_looks_at_values_is_that_of_one_device(ranks: Ranks, stages: int) -> None:
    expected = fit(None, LooksInside)
    pipeline = {"stages": stages, "num_microbatches": 2}
    for found in ranks(stages)(fit, pipeline, LooksInside, group=False):
        assert_same(found, expected)


class Writes(pl.LightningModule):
    """A small language model that samples until it has written an end, with a cache in its layers' argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(Mixes() for _ in range(3))
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor, cache: list[dict[str, Tensor]]) -> Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, cache[number])
        return self.head(x)

    def generate(self, tokens: Tensor, most: int = 12) -> Tensor:
        cache: list[dict[str, Tensor]] = [{} for _ in self.layers]
        given = tokens
        for _ in range(most):
            logits = self(given, cache)[:, -1]
            given = torch.multinomial(logits.softmax(-1), 1)
            tokens = torch.cat([tokens, given], 1)
            if bool((given == 0).all()):
                break
        return tokens

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0][:, :-1], [{} for _ in self.layers])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = self.generate(batch[0])
        self.log_dict(
            {"length": float(tokens.shape[1]), "mean": tokens.float().mean()}, batch_size=len(tokens)
        )

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.generate(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mixes(nn.Module):
    """A layer that adds up what came before, which its cache holds."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        total = x.cumsum(1) + cache.get("total", torch.zeros(()))
        cache["total"] = total[:, -1:]
        return x + torch.tanh(self.mix(total))


def written(pipeline: dict[str, Any] | None) -> Any:
    pl.seed_everything(5)
    data = DataLoader(TensorDataset(torch.arange(6).reshape(3, 2) + 1), batch_size=2)
    module, run = Writes(), trainer(pipeline)
    run.fit(module, data, data)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return run.predict(module, data), (weights(module), logged)


@pytest.mark.parametrize("stages", [2, 3])
def test_tokens_are_generated_in_a_step(ranks: Ranks, stages: int) -> None:
    expected, fitted = written(None)
    found = ranks(stages)(written, {"stages": stages}, group=False)
    torch.testing.assert_close(found[0][0], expected)
    for _, own in found:
        assert_same(own, fitted, 1e-5)


class Gan(pl.LightningModule):
    """Two networks, two optimizers, a schedule, clipping, and steps of one of them every other batch only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.make = nn.Sequential(
            nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, FEATURES)
        ).double()
        self.judge = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        ).double()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.shown: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, judge = self.optimizers()
        schedule = self.lr_schedulers()
        real, noise = batch[0], torch.randn(len(batch[0]), 2, dtype=torch.float64)
        self.toggle_optimizer(generator)
        fake = self.make(noise) * self.scale
        loss = nn.functional.softplus(-self.judge(fake)).mean()
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(judge)
        score = self.judge(torch.cat([real, fake.detach()]))
        sign = torch.cat([-torch.ones(len(real)), torch.ones(len(real))]).double().unsqueeze(1)
        other = nn.functional.softplus(sign * score).mean()
        self.manual_backward(other / 2)
        if batch_idx % 2:
            judge.step()
            judge.zero_grad()
            schedule.step()
        self.untoggle_optimizer(judge)
        self.shown.append(float(other))
        self.log_dict({"make": loss, "judge": other}, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.judge(batch[0]).mean())

    def on_train_epoch_end(self) -> None:
        self.log("sample", self.make(torch.ones(1, 2, dtype=torch.float64)).sum())

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam([*self.make.parameters(), self.scale], lr=0.01)
        second = torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(second, 0.5)]


def fought(pipeline: dict[str, Any] | None) -> Any:
    pl.seed_everything(7)
    module, run = Gan(), trainer(pipeline)
    run.fit(module, loader(), loader(seed=4))
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), metrics), module.shown, run.global_step


@pytest.mark.parametrize("stages", [2, 3])
def test_manual_optimization_is_that_of_one_device(ranks: Ranks, stages: int) -> None:
    expected, shown, steps = fought(None)
    for found, seen, count in ranks(stages)(fought, {"stages": stages}, group=False):
        assert_same(found, expected)
        assert seen == pytest.approx(shown, rel=1e-12)
        assert count == steps
