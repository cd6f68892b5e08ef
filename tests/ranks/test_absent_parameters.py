"""Hooks and callbacks meet the parameters of the whole model on every rank: their numbers are those of one device."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_pipeline.errors import PipelineError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class ClipsOverGroups(Regression):
    """By hand, with numbers of Python."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = 0.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                flat = parameter.grad.flatten()
                total += float(flat @ flat)
        scale = 0.05 / math.sqrt(total)
        if scale < 1.0:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(scale)


class RateByState(Regression):
    """A learning rate by the norm of the optimizer's state."""

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        total = math.sqrt(sum(float(v["momentum_buffer"].norm()) ** 2 for v in optimizer.state.values()))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1.0 + total)


class ScalesOnTrainStart(Regression):
    def on_train_start(self) -> None:
        total = sum(parameter.detach().norm() for parameter in self.parameters())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(3.0 / total)


class ClipsTogether(Regression):
    """torch's functions, a norm in one tensor, and one that adds up in place."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        self.history.append(float(get_total_norm(gradients)))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        total = torch.zeros((), dtype=torch.float64)
        for gradient in gradients:
            total += gradient.pow(2).sum()
        self.history += [norm.item(), total.sqrt().item()]
        for gradient in gradients:
            gradient.mul_((0.1 / norm).clamp(max=1.0))
        clip_grad_norm_(self.parameters(), 0.08)
        clip_grad_value_(self.parameters(), 0.01)


class ClipsEach(Regression):
    """Adaptive clipping: each gradient by its own norm and that of its parameter."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                most = parameter.detach().norm().clamp(min=1e-3) * 0.02
                norm = parameter.grad.detach().norm()
                if norm > most:
                    parameter.grad.detach().mul_(most / norm)


class Loops(Regression):
    """Harmless: names, counts, freezing by position, gradients zeroed in place."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        self.history += [len(names), sum(p.numel() for p in self.parameters())]
        for frozen in (1, 2, 5):
            list(self.parameters())[frozen].requires_grad_(batch_idx % 2 == 1)
        assert list(self.state_dict()) == [name for name, _ in self.named_parameters()]

    def on_after_backward(self) -> None:
        self.history.append(sum(p.grad is not None for p in self.parameters()))
        torch._foreach_mul_([p.grad for p in self.parameters() if p.grad is not None], 0.9)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class SkipsNan(Regression):
    """A step without gradients where any of them is large."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if any(bool((p.grad.abs() > 0.2).any()) for p in self.parameters()):
            for parameter in self.parameters():
                parameter.grad.zero_()


class ClipsUnrelated(Regression):
    """A network that is no part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = [nn.Linear(6, 1).double()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        helper = self.helper[0]
        helper.zero_grad()
        helper(batch[0]).pow(2).mean().backward()
        self.history.append(float(clip_grad_norm_(helper.parameters(), 0.01)))
        if self.trainer.is_global_zero:
            clip_grad_norm_(helper.parameters(), 0.005)


class GlobalNormed(torch.optim.Optimizer):
    """Its step divides by the norm over all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.zeros(1, dtype=torch.float64)
        for parameter in every:
            total.add_(parameter.grad.pow(2).sum())
        for parameter in every:
            state = self.state[parameter]
            state.setdefault("mean", torch.zeros_like(parameter)).mul_(0.5).add_(parameter.grad)
            parameter.sub_(self.param_groups[0]["lr"] * state["mean"] / total.sqrt())
        return loss


class UsesGlobalNorm(Regression):
    def configure_optimizers(self) -> Any:
        return GlobalNormed(self.parameters())


class GroupsByValue(Regression):
    def configure_optimizers(self) -> Any:
        large = [p for p in self.parameters() if float(p.detach().abs().max()) > 0.3]
        small = [p for p in self.parameters() if float(p.detach().abs().max()) <= 0.3]
        return torch.optim.SGD([{"params": large}, {"params": small, "lr": 0.1 / len(large)}], lr=0.01)


class LogsEach(Regression):
    """Norms of gradients and ratios, each of one parameter."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            self.log(f"norm/{name}", parameter.grad.norm())
            self.log(f"largest/{name}", float(parameter.grad.abs().max()))
        self.log("total", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def on_train_batch_end(self, *args: Any) -> None:
        metrics = self.trainer.callback_metrics
        self.history += [float(metrics[key]) for key in sorted(metrics) if "/" in key or key == "total"]


class SomeWithoutGradient(Regression):
    """A layer in every second batch, one that no step calls, and a scale by hand over what has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.ModuleList([nn.Linear(3, 3).double(), nn.Linear(3, 3).double()])

    def loss(self, batch: tuple[Tensor, Tensor], leave_out: bool = False) -> Tensor:
        h = batch[0]
        for number, layer in enumerate(self.net):
            h = h if leave_out and number in (2, 4) else layer(h)
        return nn.functional.mse_loss(h, batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, leave_out=batch_idx % 2 == 1)

    def on_after_backward(self) -> None:
        self.history += [float(p.grad is None) for p in self.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        trained = [p for p in self.parameters() if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in trained]).norm()
        for parameter in trained:
            parameter.grad.mul_(0.1 / total)
        self.history += [float(total), *(float(p.grad is None) for p in self.parameters())]


CASES = [
    SomeWithoutGradient,
    ClipsOverGroups, RateByState, ScalesOnTrainStart, ClipsTogether, ClipsEach, Loops, SkipsNan, ClipsUnrelated,
    UsesGlobalNorm, GroupsByValue, LogsEach,
]  # fmt: skip


def fit(cls: type[Regression], stages: int | None) -> tuple[Any, list[float]]:
    module = cls()
    run = trainer({"stages": stages, "num_microbatches": 2, "step_timeout": 20} if stages else None)
    run.fit(module, loader())
    flags = [float(parameter.requires_grad) for parameter in module.parameters()]
    return (weights(module), {}), module.history + flags


@pytest.mark.parametrize(("stages", "cls"), [(2 + number % 2, cls) for number, cls in enumerate(CASES)])
def test_a_hook_over_parameters_is_that_of_one_device(
    ranks: Ranks, cls: type[Regression], stages: int
) -> None:
    expected, history = fit(cls, None)
    for found, seen in ranks(stages)(fit, cls, stages):
        assert_same(found, expected)
        assert seen == pytest.approx(history, rel=1e-9)


class Average(pl.Callback):
    """A moving average of the weights by hand, that validates in their place."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.average = copy.deepcopy(pl_module.net)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            for mine, its in zip(self.average.parameters(), pl_module.net.parameters(), strict=True):
                mine.mul_(0.7).add_(its, alpha=0.3)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.kept = {name: value.clone() for name, value in pl_module.net.state_dict().items()}
        pl_module.net.load_state_dict(self.average.state_dict())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.net.load_state_dict(self.kept)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.net.load_state_dict(self.average.state_dict())


class Shadow(pl.Callback):
    """The same with a dictionary by name, and foreach."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        values = [p.detach() for p in pl_module.parameters()]
        torch._foreach_lerp_(list(self.shadow.values()), values, 0.3)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.shadow[name])


class Averaged(pl.Callback):
    """torch's `AveragedModel`."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.model = AveragedModel(pl_module.net, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.model.update_parameters(pl_module.net)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.net.load_state_dict(self.model.module.state_dict())


AVERAGES: list[Callable[[], pl.Callback]] = [
    Average, Shadow, Averaged, WeightAveraging, lambda: EMAWeightAveraging(decay=0.7),
    lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1),
]  # fmt: skip


class Normed(Regression):
    """Buffers on two stages, of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1], self.net[5] = nn.BatchNorm1d(8).double(), nn.BatchNorm1d(8).double()


def average(number: int, stages: int | None) -> Any:
    module, callback = Normed(), AVERAGES[number]()
    strategy = {"stages": stages, "num_microbatches": 1, "step_timeout": 20} if stages else None
    run = trainer(strategy, max_epochs=3, callbacks=[callback])
    run.fit(module, loader(), loader(seed=4))
    copies = [value for value in vars(callback).values() if isinstance(value, nn.Module)]
    held = {f"{i}.{name}": p.detach() for i, one in enumerate(copies) for name, p in one.state_dict().items()}
    return ({**module.state_dict(), **held}, {n: float(v) for n, v in run.callback_metrics.items()})


@pytest.mark.parametrize(("stages", "number"), [(3 if n == 2 else 2, n) for n in range(len(AVERAGES))])
def test_averages_of_weights_are_those_of_one_device(ranks: Ranks, number: int, stages: int) -> None:
    expected = average(number, None)
    for found in ranks(stages)(average, number, stages):
        assert_same(found, expected)


class Saves(Regression):
    """A checkpoint written and read in hooks, at once and by this thread."""

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(self.path)
        self.history.append(float(sum(p.detach().norm() for p in self.parameters())))


def saved(stages: int | None, folder: str, **options: Any) -> Any:
    module = Saves()
    module.path = f"{folder}/saved{stages}"
    run = trainer({"stages": stages, "num_microbatches": 2, **options} if stages else None, max_epochs=1)
    run.fit(module, loader())
    again = Regression()
    pipeline = {"stages": stages, "num_microbatches": 2} if stages else None
    trainer(pipeline).fit(again, loader(), ckpt_path=module.path)
    return (weights(again), {}), module.history


@pytest.mark.parametrize("async_save", [True, False])
def test_hooks_save(ranks: Ranks, tmp_path: Path, async_save: bool) -> None:
    expected, history = saved(None, str(tmp_path))
    for found, seen in ranks(2)(partial(saved, async_save=async_save), 2, str(tmp_path)):
        assert_same(found, expected)
        assert seen == pytest.approx(history, rel=1e-9)


def resumed(number: int, stages: int | None, folder: str) -> Any:
    """Two epochs, a checkpoint, and one more in a run of its own."""
    strategy = {"stages": stages, "num_microbatches": 1, "step_timeout": 20} if stages else None
    path = f"{folder}/saved{stages}"

    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    first = trainer(strategy, callbacks=[AVERAGES[number](), Saves()])
    first.fit(Normed(), loader())
    module = Normed()
    run = trainer(strategy, max_epochs=3, callbacks=[AVERAGES[number]()])
    run.fit(module, loader(), ckpt_path=path)
    return dict(module.state_dict()), {}


@pytest.mark.parametrize("number", [3])
def test_averages_in_a_checkpoint_go_on(ranks: Ranks, tmp_path: Path, number: int) -> None:
    expected = resumed(number, None, str(tmp_path))
    for found in ranks(2)(resumed, number, 2, str(tmp_path)):
        assert_same(found, expected)


class ReadsAlone(Regression):
    """One rank alone reads what others have."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            float(self.net[0].weight.norm())


def test_a_read_by_one_rank_alone_ends_and_says_what_it_waits_for(ranks: Ranks) -> None:
    for outcome in ranks(2).outcomes(fit_quickly, ReadsAlone):
        with pytest.raises(PipelineError, match=r"not at the same place of a hook|stopped in"):
            raise outcome.error or AssertionError("nothing was raised")


def fit_quickly(cls: type[Regression]) -> None:
    trainer({"stages": 2, "step_timeout": 3}).fit(cls(), loader())


def test_the_groups_are_those_of_the_whole_model(ranks: Ranks) -> None:
    for names in ranks(2)(listed):
        assert names == [name for name, _ in Regression().named_parameters()]


def listed() -> list[str]:
    module, run = Regression(), trainer({"stages": 2}, max_epochs=1)
    found: list[str] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
            found[:] = [names[id(p)] for p in trainer.optimizers[0].param_groups[0]["params"]]

    run.callbacks.append(Looks())
    run.fit(module, loader())
    now: list[Tensor] = run.optimizers[0].param_groups[0]["params"]
    assert [id(p) for p in now] == [id(p) for p in module.parameters()]
    return found
