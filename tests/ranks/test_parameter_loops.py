"""Loops over the whole module's parameters around a step are those of the whole model (R6)."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.errors import ConfigurationError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class ClipsByHand(Regression):
    """Torch's clipping and Lightning's `grad_norm` in a hook, as Lightning's documentation shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.net[4].weight = self.net[2].weight  # tied, over two stages

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({name: float(value) for name, value in grad_norm(self, norm_type=2).items()})
        self.seen.append(float(clip_grad_norm_(self.parameters(), 0.05)))


def fit(
    cls: type[Regression], stages: int | None, *callbacks: pl.Callback
) -> tuple[Regression, dict[str, Tensor]]:
    module = cls()
    strategy: Any = PipelineStrategy(stages=stages, num_microbatches=4) if stages else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages or 1, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, loader())
    return module, {name: value.detach().clone() for name, value in module.state_dict().items()}


def clip(stages: int | None) -> tuple[list[Any], dict[str, Tensor]]:
    module, weights = fit(ClipsByHand, stages)
    return module.seen, weights  # type: ignore[return-value]


@pytest.mark.parametrize("stages", [2, 3])
def test_clipping_and_norms_in_a_hook_are_those_of_the_whole_model(ranks: Ranks, stages: int) -> None:
    expected, weights = clip(None)
    for seen, found in ranks(stages)(clip, stages):
        assert [type(one) for one in seen] == [type(one) for one in expected]
        for mine, theirs in zip(seen, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


class ClipsGroups(Regression):
    """A norm over the optimizer's groups."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((0.1 / norm).clamp(max=1.0))


class SkipsLargeSteps(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        if torch.stack([p.grad.norm() for p in optimizer.param_groups[0]["params"]]).norm() < 0.5:
            optimizer.step()


class OwnOptimizer(torch.optim.Optimizer):
    """Goes over its groups in methods of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in self.of(group):
                parameter -= group["lr"] * parameter.grad
        return loss

    def of(self, group: dict[str, Any]) -> list[Any]:
        return [parameter for parameter in group["params"] if parameter.grad is not None]


class UsesOwnOptimizer(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], 0.05)
        for parameter in getattr(self.trainer.strategy, "own_parameters", self.parameters)():
            parameter.grad.clamp_(-0.01, 0.01)

    def configure_optimizers(self) -> Any:
        return OwnOptimizer(self.parameters())


class ChangesEach(Regression):
    """Each gradient by itself, by way of the optimizer's groups."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.01, 0.01)


class SmallHead(Regression):
    """float64; on one stage nothing is trained, so that it has no gradient to take the dtype of."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:4].requires_grad_(False)
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [float(value) for value in grad_norm(self, norm_type=2).values()]
        self.seen.append(float(clip_grad_norm_(self.parameters(), 0.05)))


def fit_class(cls: type[Regression], stages: int | None) -> tuple[Any, dict[str, Tensor]]:
    module, weights = fit(cls, stages)
    return getattr(module, "seen", None), weights


@pytest.mark.parametrize("cls", [ClipsGroups, SkipsLargeSteps, UsesOwnOptimizer, ChangesEach, SmallHead])
def test_loops_over_groups_optimizers_of_the_user_and_norms_keep_their_digits(
    ranks: Ranks, cls: type[Regression]
) -> None:
    seen, weights = fit_class(cls, None)
    for found_seen, found in ranks(2)(fit_class, cls, 2):
        assert found_seen == (seen if seen is None else pytest.approx(seen, rel=1e-12))
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


class AsksTooEarly(Regression):
    def setup(self, stage: str) -> None:
        for ask in (self.trainer.strategy.own_parameters, self.trainer.strategy.describe):
            with pytest.raises(ConfigurationError, match="known once the module is split: after the `setup`"):
                ask()

    def on_fit_start(self) -> None:
        assert len(list(self.trainer.strategy.own_parameters())) == 4
        assert len(self.trainer.strategy.describe().rows) == 2


def test_who_asks_for_the_stages_in_setup_is_told_when_they_are_known(ranks: Ranks) -> None:
    ranks(2)(fit, AsksTooEarly, 2, group=False)


class Adapter(torch.nn.Linear):
    """Lists as its own only what a user trains, as wrappers of pretrained layers do."""

    def parameters(self, recurse: bool = True) -> Any:
        return iter([self.bias])

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return ((name, one) for name, one in super().named_parameters(*args, **options) if "bias" in name)


class ListsWhatItTrains(Regression):
    """Leaves out of its parameters those that it does not train: the optimizer never sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = Adapter(8, 8).double()
        self.scale = torch.nn.LayerNorm(6).double()

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return (
            (name, one) for name, one in super().named_parameters(*args, **options) if "scale" not in name
        )

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.scale(batch[0]), batch[1]))

    def on_before_backward(self, loss: Tensor) -> None:
        self.on_after_backward()  # those that no optimizer zeroes are there

    def on_after_backward(self) -> None:
        gradients = {name: one.grad for name, one in torch.nn.Module.named_parameters(self)}
        self.history += [float(one.norm()) for one in gradients.values() if one is not None]


def fit_and_save(stages: int | None, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    module, pipeline = ListsWhatItTrains(), {"stages": stages, "num_microbatches": 4} if stages else None
    run = trainer(pipeline, writes=folder, max_epochs=2)
    run.fit(module, loader(), loader(seed=4))
    run.save_checkpoint(f"{folder}/end.ckpt")
    again = trainer(pipeline, writes=folder, max_epochs=3)
    again.fit(module, loader(), loader(seed=4), ckpt_path=f"{folder}/end.ckpt")
    return module.state_dict(), module.history


@pytest.mark.parametrize("stages", [1, 2])
def test_a_module_may_list_some_of_its_parameters(ranks: Ranks, stages: int, tmp_path: Any) -> None:
    expected, history = fit_and_save(None, str(tmp_path / "one"))
    for found, seen in ranks(stages)(fit_and_save, stages, str(tmp_path / "some")):
        assert seen == pytest.approx(history, rel=1e-9)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
