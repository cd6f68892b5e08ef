"""What hooks set between the setup and the first step is there for that step, as on one device."""

import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, fit, loader, mlp, trainer, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}


class Total(Regression):
    """The number of steps, as a ramp needs it."""

    def on_fit_start(self) -> None:
        self.total_steps = self.trainer.estimated_stepping_batches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + self.global_step / self.total_steps)


class AsksTheTrainer(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("batches", float(self.trainer.num_training_batches))
        return loss * (1 + self.global_step / self.trainer.estimated_stepping_batches)


class Started(Regression):
    def on_train_start(self) -> None:
        self.start = time.monotonic()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("is_later", float(time.monotonic() >= self.start))
        return super().training_step(batch, batch_idx)


class InSetup(Total):
    def on_fit_start(self) -> None:
        """As of one that sets nothing."""

    def setup(self, stage: str) -> None:
        self.total_steps = self.trainer.estimated_stepping_batches


class Prototypes(Regression):
    """A plain tensor that a hook moves."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes: Tensor | None = None

    def on_fit_start(self) -> None:
        self.prototypes = torch.zeros(FEATURES, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0] - self.prototypes, batch[1]), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.prototypes = 0.9 * self.prototypes + 0.1 * batch[0].mean(dim=0)


class Drawn(Regression):
    """Drawn on one device from the same random state."""

    def on_train_epoch_start(self) -> None:
        self.register_buffer("noise", torch.randn(FEATURES, dtype=torch.float64), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0] + 0.1 * self.noise, batch[1]), batch_idx)


class Averaged(Regression):
    """A teacher: a copy of the network that follows it."""

    def on_fit_start(self) -> None:
        self.ema_model = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            target = self.ema_model(batch[0])
        return loss + nn.functional.mse_loss(self.net(batch[0]), target)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, own in zip(self.ema_model.parameters(), self.net.parameters(), strict=True):
                mean.mul_(0.9).add_(own, alpha=0.1)


class SetsIt(Callback):
    """Of the user's; what it sets in the module."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.factor = 0.5


class SetByCallback(Regression):
    def configure_callbacks(self) -> Any:
        return [SetsIt()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor


class SetWithOptimizers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rate", self.main.param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        self.main = super().configure_optimizers()
        return self.main


class BuiltInParts(Total):
    """Without weights, which each rank makes for its own stages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.net = mlp().double()


class BuiltFromAList(BuiltInParts):
    """What the first run of the step stumbles over is no attribute of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[float] = []

    def on_train_start(self) -> None:
        self.factors.append(2.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.factors[0] * super().training_step(batch, batch_idx)


CASES = [
    Total, InSetup, AsksTheTrainer, Started, Prototypes, Drawn, Averaged, SetByCallback, SetWithOptimizers,
    BuiltInParts, BuiltFromAList,
]  # fmt: skip


def fitted(pipeline: dict[str, Any] | None, case: Any, folder: str) -> Any:
    pl.seed_everything(3)
    gathered = pipeline and {**pipeline, "gather_weights": "all"}
    module, run = case(), trainer(gathered, num_sanity_val_steps=1, writes=folder)
    run.fit(module, loader(24, shuffle=True), loader(seed=4))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.__name__))
def test_what_hooks_set_is_read_in_the_step(ranks: Ranks, tmp_path: Path, case: Any) -> None:
    expected = fitted(None, case, str(tmp_path / "one"))
    for found in ranks(2)(fitted, TWO, case, str(tmp_path / "two")):
        assert_same(found, expected)


class Anchored(Regression):
    """Elastic weight consolidation: weights are kept by a hook, and held near in the step."""

    def on_fit_start(self) -> None:
        self.old = {name: 0.9 * p.detach().clone() for name, p in self.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        far = sum(((p - self.old[name]) ** 2).sum() for name, p in self.named_parameters())
        self.log("far", far)
        return super().training_step(batch, batch_idx) + 0.1 * far


class AnchoredAnew(Anchored):
    """Each epoch holds near what the one before has ended with."""

    def on_fit_start(self) -> None:
        """Nothing yet."""

    def on_train_epoch_start(self) -> None:
        super().on_fit_start()


class AnchoredInValidation(Anchored):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        far = [(p - self.old[name]).abs().max() for name, p in self.named_parameters()]
        self.log("val_far", torch.stack(far).max())


@pytest.mark.parametrize(("case", "stages"), [(Anchored, 2), (AnchoredAnew, 3), (AnchoredInValidation, 2)])
def test_weights_that_a_hook_keeps_are_read_on_all_stages(
    ranks: Ranks, tmp_path: Path, case: Any, stages: int
) -> None:
    expected = fitted(None, case, str(tmp_path / "one"))
    for found in ranks(stages)(
        fitted, {"stages": stages, "num_microbatches": 2}, case, str(tmp_path / "two")
    ):
        assert_same(found, expected)


class WatchedInValidation(Anchored):
    """Training reads the weights of its own stages alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Regression.training_step(self, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_far", sum(((p - self.old[name]) ** 2).sum() for name, p in self.named_parameters()))


def accumulated(pipeline: dict[str, Any] | None) -> Any:
    """The first step that reads the weights is a validation between two batches of one optimizer step."""
    module = WatchedInValidation()
    run = trainer(
        pipeline, accumulate_grad_batches=2, val_check_interval=1, num_sanity_val_steps=0, max_epochs=2
    )
    run.fit(module, loader(24), loader(seed=4))
    return {name: float(value) for name, value in run.callback_metrics.items()}


def test_copies_of_weights_go_on_from_accumulated_gradients(ranks: Ranks) -> None:
    expected = accumulated(None)
    for found in ranks(2)(accumulated, TWO):
        assert found == pytest.approx(expected, rel=1e-9)


def resumed(pipeline: dict[str, Any] | None, folder: str) -> Any:
    """The optimizer has its momentum when the first step reads the weights."""
    first = trainer(pipeline, max_epochs=1)
    first.fit(Anchored(), loader(24))
    first.save_checkpoint(f"{folder}/one.ckpt")
    module, run = Anchored(), trainer(pipeline and {**pipeline, "gather_weights": "all"}, max_epochs=3)
    run.fit(module, loader(24), ckpt_path=f"{folder}/one.ckpt")
    run.save_checkpoint(f"{folder}/two.ckpt")
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


def test_a_resume_gives_weights_that_a_hook_keeps_their_momentum(ranks: Ranks, tmp_path: Path) -> None:
    expected = resumed(None, str(tmp_path / "one"))
    for found in ranks(2)(resumed, TWO, str(tmp_path / "two")):
        assert_same(found, expected)


class Hardest(Regression):
    """A hook keeps the samples with the largest errors, which the next step takes again."""

    hard: tuple[Tensor, Tensor] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        errors = (self.net(x) - y).abs().mean(1)
        loss = errors.mean()
        if self.hard is not None:
            loss = loss + 0.5 * (self.net(self.hard[0]) - self.hard[1]).abs().mean()
        self.log("loss", loss)
        return {"loss": loss, "errors": errors.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        places = outputs["errors"].topk(2).indices
        self.hard = batch[0][places], batch[1][places]


class Hard(Hardest):
    """As two attributes, which were None."""

    def __init__(self) -> None:
        super().__init__()
        self.x: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hard = None if self.x is None else (self.x, self.y)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert self.hard is not None
        self.x, self.y = self.hard


def fit_hard(pipeline: dict[str, Any] | None, *, kind: str) -> Any:
    module, run = globals()[kind](), trainer(pipeline)
    run.fit(module, loader())
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_takes_what_a_hook_has_set_in_the_place_of_nothing(ranks: Ranks, stages: int) -> None:
    for kind in ("Hardest", "Hard"):
        expected = fit_hard(None, kind=kind)
        pipeline = {"stages": stages, "num_microbatches": 2}
        found = ranks(stages)(partial(fit_hard, kind=kind), pipeline)
        assert_same(found[0], expected)


class Misspelled(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.lost(batch)


def fails(pipeline: dict[str, Any]) -> None:
    trainer(pipeline).fit(Misspelled(), loader())


def test_what_nobody_sets_is_told_when_the_step_comes(ranks: Ranks) -> None:
    for outcome in ranks(2).outcomes(fails, TWO):
        assert "no attribute 'lost'" in str(outcome.error)


class Accumulates(Regression):
    """Says in a step over how many batches gradients add up, before its loss or after; Lightning reads it then."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.trainer.accumulate_grad_batches = 3
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            self.trainer.accumulate_grad_batches = 1
        return loss


@pytest.mark.parametrize("stages", [1, 2])
def test_batches_that_a_step_lets_add_up_divide_its_own_gradients(ranks: Ranks, stages: int) -> None:
    expected = fit(None, Accumulates)
    for found in ranks(stages)(fit, {"stages": stages, "num_microbatches": 2}, Accumulates):
        assert_same(found, expected)
