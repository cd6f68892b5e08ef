"""`whole_steps=True`: training steps that no pipeline can cut are run whole by every rank, as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from lightning_pipeline.callbacks import BubbleMonitor
from lightning_pipeline.errors import PipelineError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Forces(Regression):
    """Fits a value and its slope, as models of molecules do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.detach().requires_grad_()
        energy = self.net(x).sum(1)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        loss = nn.functional.mse_loss(energy, y.sum(1)) + nn.functional.mse_loss(force, 0.1 * x.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Steers(Regression):
    """Which layer comes next follows from what the one before gave."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        for _ in range(3):
            hidden = torch.tanh(hidden)
            if hidden.abs().mean() > 0.2:
                hidden = self.net[4](hidden)
        loss = nn.functional.mse_loss(self.net[5:](hidden), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "hidden": hidden.detach().mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history += [float(outputs["loss"]), float(outputs["hidden"])]


class Penalized(Regression):
    """Weights of all stages stand in the loss, which decides too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) + 0.01 * sum(p.square().sum() for p in self.parameters())
        self.log("loss", loss, prog_bar=True)
        return loss if batch_idx != 1 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history += [float(outputs["loss"])] if outputs else [-1.0]


class Adapts(Regression):
    """Learns weights from which one step on other samples helps (MAML), through calls with other weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        before = nn.functional.mse_loss(self.net(x[:2]), y[:2])
        slopes = torch.autograd.grad(before, list(self.net.parameters()), create_graph=True)
        named = zip(self.net.named_parameters(), slopes, strict=True)
        adapted = {name: weight - 0.1 * slope for (name, weight), slope in named}
        loss = nn.functional.mse_loss(functional_call(self.net, adapted, (x[2:],)), y[2:])
        self.log("loss", loss)
        return loss


class Measured(Regression):
    """Metrics that are called, updated and asked, in a step that looks at values; validation looks at them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.worst = MeanAbsoluteError().set_dtype(torch.float64)
        self.checked = MeanAbsoluteError().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        if out.mean() > -100:
            out = out * 1.0
        loss = nn.functional.mse_loss(out, batch[1])
        self.log("here", self.worst(out, batch[1]), on_step=True, on_epoch=True)
        self.error.update(out.detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.history.append(float(self.worst.compute()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net[:4](batch[0])
        out = self.net[4:](hidden if hidden.mean() > -100 else -hidden)
        self.log("val_here", self.checked(out, batch[1]))
        self.log("val_checked", self.checked, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.history.append(float(self.worst.compute()))


class MeasuredByHand(Measured):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]


class Transforms(Regression):
    """Functions of its own under `torch.func`, and a region that is run again, reentrant."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        slopes = vmap(grad(lambda row: row.sin().sum()))(x)
        out = checkpoint(self.net, slopes.requires_grad_(), use_reentrant=True)
        norms = vmap(lambda row: row.square().sum())(out)
        loss = nn.functional.mse_loss(out, y) + 0.1 * norms.mean()
        self.log("loss", loss)
        return loss


class OfLayers(Regression):
    """A derivative by `torch.func` through layers of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return vmap(jacrev(self.net))(batch[0]).square().mean()


class OneRegion(Regression):
    """Layers of all ranks in a region that one backward runs again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(checkpoint(self.net, batch[0], use_reentrant=False), batch[1])


class Doubled(Regression):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped and accumulated": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
}


def fit(kind: type[Regression], pipeline: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    module = kind()
    if pipeline:
        pipeline = {**pipeline, "whole_steps": kind is not MeasuredByHand, "step_timeout": 20}
    run = trainer(pipeline, max_epochs=2, **options)
    run.fit(module, loader(), loader(seed=4))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logged), [*module.history, float(run.global_step)]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [Forces, Steers, Penalized, Adapts, Measured, Transforms, Doubled])
def test_a_step_is_that_of_one_device(ranks: Ranks, kind: Any, options: str, stages: int) -> None:
    expected, history = fit(kind, None, OPTIONS[options])
    for found, seen in ranks(stages)(fit, kind, {"stages": stages}, OPTIONS[options]):
        assert_same(found, expected)
        assert seen == pytest.approx(history, rel=1e-9)


def test_metrics_that_a_step_by_hand_calls_are_those_of_one_device(ranks: Ranks) -> None:
    expected, history = fit(MeasuredByHand, None, {})
    for found, seen in ranks(2)(fit, MeasuredByHand, {"stages": 2}, {}):
        assert_same(found, expected)
        assert seen == pytest.approx(history, rel=1e-9)


class Contrasts(Regression):
    """Each sample's other is among those of all replicas, as SimCLR and CLIP gather them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = [nn.functional.normalize(self.net(one), dim=1) for one in (batch[0], batch[0] + 0.1)]
        first, second = (self.all_gather(one, sync_grads=True).reshape(-1, one.shape[1]) for one in rows)
        loss = nn.functional.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))
        self.log("loss", loss)
        return loss


def replicated(pipeline: dict[str, Any] | None, kind: type[Regression]) -> Any:
    """Each replica has a half of a batch."""
    module = kind()
    options: dict[str, Any] = {"use_distributed_sampler": False}
    run = trainer({**pipeline, "step_timeout": 20} if pipeline else None, max_epochs=2, **options)
    rows = slice(None)
    if pipeline:
        part = run.strategy.replica_index
        rows = slice(4 * part, 4 * part + 4)
    halves = [[one[rows] for one in batch] for batch in list(loader())[:2]]
    data = TensorDataset(*(torch.stack(each) for each in zip(*halves, strict=True)))
    run.fit(module, DataLoader(data, batch_size=None, shuffle=False))
    return weights(module), {}


@pytest.mark.parametrize("kind", [Forces, Contrasts])
def test_replicas_average_their_gradients(ranks: Ranks, kind: type[Regression]) -> None:
    assert all(len(batch[0]) == 8 for batch in list(loader())[:2])
    expected = replicated(None, kind)
    pipeline = {"stages": 2, "data_parallel_size": 2, "whole_steps": True}
    for found in ranks(4)(replicated, pipeline, kind, group=False):
        assert_same(found, expected)


def named(kind: type[Regression]) -> str:
    with pytest.raises(PipelineError) as told:
        trainer({"stages": 2, "num_microbatches": 2}).fit(kind(), loader())
    return str(told.value)


@pytest.mark.parametrize("kind", [Forces, Steers])
def test_a_refusal_of_such_a_step_names_it(ranks: Ranks, kind: type[Regression]) -> None:
    for told in ranks(2)(named, kind):
        assert "whole_steps=True" in told


def refused(pipeline: dict[str, Any], options: dict[str, Any], kind: type[Regression] = Forces) -> str:
    with pytest.raises(PipelineError) as told:
        trainer({"stages": 2, "whole_steps": True, **pipeline}, **options).fit(kind(), loader())
    return str(told.value)


class Wraps(nn.Module):
    """Calls a layer that is listed elsewhere."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.layers = (layer,)  # in a tuple, so that it is no part of this one

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.scale * self.layers[0](x)
        return found


class CallsALayerOfAnother(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.wrap = Wraps(self.net[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net[2:](self.wrap(batch[0])), batch[1])


def test_what_one_rank_cannot_run_for_another_is_refused(ranks: Ranks) -> None:
    for told in ranks(2)(refused, {"step_timeout": 20}, {}, OfLayers):
        assert "'net.0' is called under torch.func (vmap, grad, ...), which cannot be split" in told
    for told in ranks(2)(refused, {"step_timeout": 20}, {}, OneRegion):
        assert "let each region hold layers of one stage, or take use_reentrant=True" in told
    told = "\n".join(ranks(2)(refused, {"step_timeout": 20}, {}, CallsALayerOfAnother))
    assert "the forward of unit 'wrap' calls unit 'net.0', which is on stage 0, and a unit" in told


def test_what_goes_by_micro_batches_is_refused_beside_it(ranks: Ranks) -> None:
    assert "leave loss_over_batch out" in refused({"loss_over_batch": True, "schedule": "GPipe"}, {})
    for told in ranks(2)(refused, {}, {"callbacks": [BubbleMonitor()]}):
        assert "BubbleMonitor measures the actions of a schedule" in told
