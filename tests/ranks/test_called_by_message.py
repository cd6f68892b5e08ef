"""What a layer of another rank is given, reads beside that and leaves, where it is called by message, is one device's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from lightning_pipeline.errors import PipelineError
from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Layer(nn.Module):
    """With a linear layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)


class WholeStep(Regression):
    """The loss is made of what `made` gives, once the layers before the last one have run."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.made(batch)
        self.log("loss", loss)
        return loss

    def made(self, batch: Any) -> Tensor:
        raise NotImplementedError


class Between(WholeStep):
    """Weights of layers are used between layers: learned scales and places, and layers of low rank by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"first": nn.Parameter(torch.full((8,), 1.5, dtype=torch.float64))})
        self.places = nn.Embedding(8, 8).double()
        self.down, self.up = nn.Linear(8, 2).double(), nn.Linear(2, 8).double()

    def made(self, batch: Any) -> Tensor:
        hidden = self.net[:2](batch[0]) * self.scales["first"]
        hidden = hidden + self.places.weight[: len(hidden)]
        hidden = hidden + hidden @ self.down.weight.T @ self.up.weight.T
        return mse_loss(self.net[2:](hidden), batch[1])


class Tied(WholeStep):
    """The last layer's weights are the first one's, with a bias of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, FEATURES).double()
        self.back = nn.Linear(3, FEATURES).double()
        self.bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def made(self, batch: Any) -> Tensor:
        words = (batch[0].abs() * 3).long().clamp(max=4)[:, 0]
        scores = self.back(self.net(self.words(words))) @ self.words.weight.T + self.bias
        return cross_entropy(scores, words.roll(1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return


@dataclass
class Kept:
    hidden: Tensor
    calls: int


class Keeps(Layer):
    """Sets attributes, fills containers, and draws."""

    def __init__(self, store: dict[str, Tensor]) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.of_all = store
        self.calls, self.last, self.seen = 0, Kept(torch.zeros(()), 0), np.zeros(2)
        self.lock: Any = None
        self.table = torch.linspace(0, 1, 8, dtype=torch.float64)

    def forward(self, hidden: Tensor, tell: Callable[[Tensor], Tensor], draws: Any) -> Any:
        hidden = tell(self.inner(hidden)) + 0.1 * torch.randn(8, generator=draws[0], dtype=hidden.dtype)
        hidden = hidden * float(draws[1].uniform(0.5, 1))
        self.calls += 1
        self.losses.append(hidden.square().mean())
        self.of_all[f"{len(self.of_all)}"] = hidden
        self.last = Kept(hidden, self.calls)
        self.seen += [1, float(hidden.detach().sum())]
        self.lock = lambda: None  # which cannot be sent, and nobody reads
        return hidden, self.table, self.losses


class Fills(WholeStep):
    """Hooks on what is inside of layers fill lists; layers fill their own, and one that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Tensor] = {}
        self.features: list[Tensor] = []
        self.long: list[Any] = [0.0] * 2000
        self.blocks = nn.ModuleList([Keeps(self.store) for _ in range(3)]).double()
        for block in self.blocks:
            block.inner.register_forward_hook(self.seen)
        self.draws = torch.Generator().manual_seed(5), np.random.default_rng(6)

    def seen(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.features.append(out)
        self.long.append(float(out.detach().sum()))

    def made(self, batch: Any) -> Tensor:
        self.store.clear()
        self.features.clear()
        told: list[float] = []
        hidden = self.net[:2](batch[0])

        def tell(value: Tensor) -> Tensor:
            told.append(float(value.detach().sum()))
            return value.tanh()

        for block in self.blocks:
            block.losses = []
            hidden, table, losses = block(hidden, tell, self.draws)
            assert losses is block.losses
            hidden = hidden + table
        blocks: Any = self.blocks
        self.history += [*told, *(float(block.seen.sum()) + block.calls for block in blocks)]
        self.history += [float(self.draws[1].random()), float(len(self.features) + len(self.store))]
        self.history += self.long[2000:][-3:]
        penalty = sum(feature.abs().mean() for feature in self.features)
        penalty = penalty + sum(value.square().mean() for value in self.store.values())
        penalty = penalty + sum(block.losses[0] + block.last.hidden.std() for block in blocks)
        return mse_loss(self.net[6](hidden), batch[1]) + 0.1 * penalty


class InPlace(WholeStep):
    """A layer begins with an operation in place, as those of many U-nets; what it was given is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 8)).double()

    def made(self, batch: Any) -> Tensor:
        hidden = self.net[0](batch[0])
        return mse_loss(self.net[6](self.block(hidden) + hidden), batch[1])


class PastLightning(WholeStep):
    """The optimizer's own step, one by a scaler of the user's, and the largest gradient of all."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = mse_loss(self.net(batch[0]), batch[1])
        if batch_idx % 2:
            self.manual_backward(loss)
            optimizer.step()
        else:
            self.manual_backward(self.scaler.scale(loss))
            if self.current_epoch:
                first: Any = self.net[0].weight
                first.grad[0, 0] = float("inf")
            self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)
            self.scaler.update()
        largest = max(parameter.grad.abs().max() for parameter in self.parameters())  # type: ignore[union-attr]
        self.history += [self.scaler.get_scale(), float(largest), float(self.trainer.global_step)]
        first, last = self.net[0].bias.detach(), self.net[4].bias.detach()
        self.history += [
            float((first <= last).sum()),
            float((last == first).sum()),
            float(min(first.sum(), last.sum())),
        ]


class Penalised(WholeStep):
    """Validation, which is cut, reads weights between layers, so that several stages have copies of them."""

    def size(self) -> Tensor:
        return sum((one.square().sum() for one in self.parameters()), torch.zeros((), dtype=torch.float64))

    def made(self, batch: Any) -> Tensor:
        return self.loss(batch) + 0.01 * self.size()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch) * self.size())


KINDS = [Between, Tied, Fills, InPlace, PastLightning, Penalised]


def fit(kind: type[Regression], pipeline: dict[str, Any] | None) -> Any:
    module = kind()
    options = {**pipeline, "whole_steps": kind is not PastLightning, "step_timeout": 20} if pipeline else None
    run = trainer(options, max_epochs=2)
    run.fit(module, loader(), loader(seed=4))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logged), module.history


@pytest.mark.parametrize("stages", [3, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_one_device(ranks: Ranks, kind: type[Regression], stages: int) -> None:
    expected, history = fit(kind, None)
    for found, seen in ranks(stages)(fit, kind, {"stages": stages}):
        assert_same(found, expected)
        assert seen == pytest.approx(history, rel=1e-9)


class OneRankCalls(Regression):
    """Hooks of the module call it on one rank alone."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.called()

    def on_train_epoch_end(self) -> None:
        self.called()

    def called(self) -> None:
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self.history.append(float(self.net(torch.ones(2, FEATURES, dtype=torch.float64)).sum()))


def fit_cut(kind: type[Regression], pipeline: dict[str, Any] | None) -> Any:
    module = kind()
    run = trainer({**pipeline, "step_timeout": 20} if pipeline else None, max_epochs=2)
    run.fit(module, loader(), loader(seed=4))
    return (weights(module), {}), module.history


def test_a_hook_of_the_module_may_call_it_on_one_rank(ranks: Ranks) -> None:
    expected, history = fit_cut(OneRankCalls, None)
    found = ranks(2)(fit_cut, OneRankCalls, {"stages": 2, "num_microbatches": 2})
    for one, _ in found:
        assert_same(one, expected)
    assert sorted(len(seen) for _, seen in found) == [0, len(history)]
    assert max((seen for _, seen in found), key=len) == pytest.approx(history, rel=1e-9)


class LosesAScale(WholeStep):
    """A hook inside a layer multiplies by a weight that the layer is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
        self.block[0].register_forward_hook(lambda module, args, out: out * self.scale)

    def made(self, batch: Any) -> Tensor:
        return mse_loss(self.net[6](self.block(self.net[:2](batch[0]))), batch[1])


class ReadsWhatIsElsewhere(Fills):
    """The step reads what a layer has made, and what cannot be sent."""

    def made(self, batch: Any) -> Tensor:
        loss = super().made(batch)
        for block in self.blocks:
            block.lock()  # type: ignore[operator]
        return loss


def refused(kind: type[Regression], units: list[str]) -> str:
    run = trainer({"stages": 2, "whole_steps": True, "step_timeout": 20, "units": units})
    with pytest.raises(PipelineError) as told:
        run.fit(kind(), loader())
    return str(told.value)


@pytest.mark.parametrize(
    ("kind", "units", "words"),
    [
        (
            ReadsWhatIsElsewhere,
            ["blocks.0"],
            "has made something that cannot be pickled, and so is on its rank alone",
        ),
        (
            LosesAScale,
            ["block"],
            "to 'scale', which is neither its own nor given to it: give it as an argument",
        ),
    ],
)
def test_what_gradients_or_messages_do_not_reach_is_refused(
    ranks: Ranks, kind: type[Regression], units: list[str], words: str
) -> None:
    for told in ranks(2)(refused, kind, units):
        assert words in told
