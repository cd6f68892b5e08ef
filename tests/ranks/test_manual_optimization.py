"""Manual optimization over stages, with all that a run may have beside it, is that of one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_pipeline.callbacks import BubbleMonitor, PipelineTimeline, StageMemoryMonitor
from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import assert_same, trainer, weights

Ranks = Callable[[int], Pool]
WORDS, WIDTH, ROWS = 7, 8, 8


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.m(x))


class Tied(pl.LightningModule):
    """Two optimizers with a schedule each, a weight of two stages, accumulation and clipping by hand."""

    def __init__(self, clip: str = "lightning", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.automatic_optimization = False
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Mixes() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)
        self.clip = clip

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.loss(batch[0])
        self.manual_backward(loss / 2)
        self.log("loss", loss, prog_bar=True)
        if batch_idx % 2:
            self.log("norm", self.clipped(first))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            for schedule in self.lr_schedulers():
                schedule.step()

    def clipped(self, optimizer: Any) -> float:
        if self.clip == "lightning":
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            return 0.0
        if self.clip == "torch":
            return float(nn.utils.clip_grad_norm_(self.parameters(), 0.05))
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.05 / norm)
        return float(norm)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]))

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam([*self.embed.parameters(), *self.layers[:2].parameters()], lr=0.02)
        second = torch.optim.SGD(self.layers[2:].parameters(), lr=0.1, momentum=0.9)
        schedules = [
            torch.optim.lr_scheduler.ExponentialLR(first, 0.9),
            torch.optim.lr_scheduler.StepLR(second, 2, 0.5),
        ]
        return [first, second], schedules


def words(seed: int, rows: int = 4 * ROWS) -> Tensor:
    return torch.randint(0, WORDS, (rows, 5), generator=torch.Generator().manual_seed(seed))


def loader(seed: int, rows: slice = slice(None)) -> DataLoader[Any]:
    batches = [(part[rows],) for part in words(seed).split(ROWS)]
    return DataLoader(TensorDataset(torch.stack([b for (b,) in batches])), batch_size=None, shuffle=False)


def fitted(
    pipeline: dict[str, Any] | None, make: Callable[..., Any] = Tied, *args: Any, **options: Any
) -> Any:
    module, path = make(*args), options.pop("ckpt_path", None)
    run = trainer(pipeline, use_distributed_sampler=False, **options)
    rows = slice(None)
    if pipeline and pipeline.get("data_parallel_size", 1) == 2:
        part = run.strategy.replica_index
        rows = slice(ROWS // 2 * part, ROWS // 2 * (part + 1))
    run.fit(module, loader(1, rows), loader(2, rows), ckpt_path=path, weights_only=False)
    rates = {f"rate {n}": o.param_groups[0]["lr"] for n, o in enumerate(run.optimizers)}
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), logs | rates


@pytest.mark.parametrize(("stages", "clip"), [(2, "lightning"), (2, "torch"), (3, "by hand")])
def test_tied_weights_clipping_and_schedules_are_those_of_one_device(
    ranks: Ranks, stages: int, clip: str
) -> None:
    expected = fitted(None, Tied, clip)
    for found in ranks(stages)(fitted, {"stages": stages}, Tied, clip, group=False):
        assert_same(found, expected)


def test_replicas_average_their_gradients(ranks: Ranks) -> None:
    expected = fitted(None, Tied, "torch")
    for found in ranks(4)(fitted, {"stages": 2, "data_parallel_size": 2}, Tied, "torch", group=False):
        assert_same((found[0], {}), (expected[0], {}))
        assert found[1]["norm"] == pytest.approx(expected[1]["norm"], rel=1e-10)


def fitted_with(pipeline: dict[str, Any] | None, precision: str) -> Any:
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        return fitted(
            pipeline, Tied, "none", torch.float32, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
        )
    return fitted(pipeline, Tied, "torch", torch.float32, precision=precision)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_is_that_of_one_device(ranks: Ranks, precision: str) -> None:
    expected = fitted_with(None, precision)
    for found in ranks(2)(fitted_with, {"stages": 2}, precision, group=False):
        assert_same(found, expected, tolerance=1e-5)


def monitored(pipeline: dict[str, Any] | None, path: Path, monitor: Any = StageMemoryMonitor) -> Any:
    options: dict[str, Any] = {"default_root_dir": path, "logger": True, "enable_checkpointing": True}
    return fitted(pipeline, Tied, callbacks=[monitor()], **options)


def test_memory_and_checkpoints_are_looked_after(ranks: Ranks, tmp_path: Path) -> None:
    expected, pipeline = fitted(None), {"stages": 2, "num_microbatches": 4}
    outcomes = ranks(2).outcomes(monitored, pipeline, tmp_path, group=False)
    assert "runs training_step on its replica's whole batch, without micro-batches" in outcomes[0].output
    for found in (outcome.value for outcome in outcomes):
        ours = {name: value for name, value in found[1].items() if name in expected[1]}
        assert_same((found[0], ours), expected)
        assert found[1]["pipeline/stage_0/parameters"] > 0


@pytest.mark.parametrize("monitor", [BubbleMonitor, PipelineTimeline])
def test_what_measures_a_schedule_is_refused_at_the_start(ranks: Ranks, tmp_path: Path, monitor: Any) -> None:
    with pytest.raises(
        RankFailure, match=f"{monitor.__name__} measures the actions of a schedule, and with man"
    ):
        ranks(2)(monitored, {"stages": 2}, tmp_path, monitor, group=False)


def resumed(pipeline: dict[str, Any] | None, path: Path) -> Any:
    module = Tied()
    run = trainer(pipeline, use_distributed_sampler=False, max_epochs=1)
    run.fit(module, loader(1), loader(2))
    run.save_checkpoint(path)
    return fitted(pipeline, ckpt_path=path)


def test_a_run_is_resumed_where_it_was(ranks: Ranks, tmp_path: Path) -> None:
    expected = fitted(None)
    for found in ranks(2)(resumed, {"stages": 2}, tmp_path / "saved", group=False):
        assert_same(found, expected)


def added(module: Any, loss: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    return loss + 0.1 * weight.abs().sum()


def added_of_all(module: Any, loss: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    return loss + 0.1 * sum(each.square().sum() for each in module.parameters())


def scaled(module: Any, loss: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    return loss * weight.norm()


def balanced(module: Any, loss: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """By the gradients of one layer, as a VQGAN balances its losses."""
    (one,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (two,) = torch.autograd.grad(other, weight, retain_graph=True)
    return loss + (one.norm() / (two.norm() + 1e-4)).clamp(0, 1e4).detach() * other


class Weighed(pl.LightningModule):
    """A loss in which weights of other stages have a part."""

    def __init__(self, layer: int, function: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.automatic_optimization = False
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
        self.layer, self.function = layer, function

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, out = self.optimizers(), self.net(batch[0])
        loss = self.function(self, out.square().mean(), out.abs().mean(), self.net[self.layer].weight)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def weighed(pipeline: Any, layer: int, function: Any) -> Any:
    inputs = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module, run = Weighed(layer, function), trainer(pipeline, max_epochs=2)
    run.fit(module, DataLoader(TensorDataset(inputs), batch_size=4))
    return weights(module), {"loss": float(run.callback_metrics["loss"])}


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("function", [added, added_of_all, scaled, balanced])
def test_a_loss_in_which_weights_have_a_part_is_that_of_one_device(
    ranks: Ranks, layer: int, function: Any
) -> None:
    expected = weighed(None, layer, function)
    for found in ranks(2)(weighed, {"stages": 2}, layer, function, group=False):
        assert_same(found, expected)


class Steps(pl.LightningModule):
    """A small network that one `training_step` of its own trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.automatic_optimization = False
        layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.net = nn.Sequential(*layers).double()
        self.seen: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        spread = torch.arange(WIDTH, dtype=torch.float64) / WIDTH
        return nn.functional.mse_loss(self.net(batch[0].double().sum(1, keepdim=True) * spread), spread[:1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        self.seen.append(float(loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def doubled(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(2)


class HooksOnWeights(Steps):
    """Hooks on gradients of weights of each stage, which a backward calls once."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5 + 0.1)
            parameter.register_post_accumulate_grad_hook(doubled)


class ByClosure(Steps):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            self.seen.append(float(loss))
            return loss

        optimizer.step(closure=closure)  # type: ignore[union-attr]


class Means(Steps):
    """A metric that was given a data type: where Lightning moves it, it forgets that."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric().set_dtype(torch.float64)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.seen.append(float(self.mean(loss.detach())))
        return loss


def stepped(kind: type[Steps], pipeline: dict[str, Any] | None) -> Any:
    module = kind()
    trainer(pipeline).fit(module, loader(1))
    return (weights(module), {}), module.seen


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", [HooksOnWeights, ByClosure, Means])
def test_a_step_of_its_own_is_that_of_one_device(ranks: Ranks, kind: type[Steps], stages: int) -> None:
    expected, losses = stepped(kind, None)
    for found, seen in ranks(stages)(stepped, kind, {"stages": stages}, group=False):
        assert_same(found, expected)
        assert seen == pytest.approx(losses, rel=1e-12)
