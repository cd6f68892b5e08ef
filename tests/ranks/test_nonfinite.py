"""Gradients that are inf or nan on one stage: all ranks take the step, leave it out, or end, alike."""

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_pipeline.errors import NonFiniteError
from lightning_pipeline.model.tensors import is_placeholder
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

Ranks = Callable[[int], Pool]
FIRST, LAST = "net.0.weight", "net.6.bias"
POISONED = (0, 1)  # epoch and batch


class Poisoned(Regression):
    """In one batch the gradient of one parameter is nan; Adam, and a schedule by steps."""

    def __init__(self, name: str, only: str = "", factor: float = float("nan")) -> None:
        super().__init__()
        self.armed = False
        self.only, self.factor = only, factor
        self.rates: list[float] = []
        self.get_parameter(name).register_hook(self.poison)

    def poison(self, gradient: Tensor) -> Tensor:
        here = self.only in ("", os.environ.get("RANK", ""))
        return torch.ones_like(gradient) * self.factor if ARMED and here else gradient

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        ARMED.clear()
        if (self.trainer.current_epoch, batch_idx) == POISONED:
            ARMED.add(True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        made = torch.optim.Adam(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        return [made], [{"scheduler": scheduler, "interval": "step"}]


ARMED: set[bool] = set()  # not in the module, whose attributes belong to its step


class LeavesOut(Poisoned):
    """What `on_nonfinite="skip"` is to do, written by hand for one device."""

    is_left_out = False

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        last = batch_idx // self.trainer.accumulate_grad_batches == 1 // self.trainer.accumulate_grad_batches
        self.is_left_out = epoch == 0 and last
        if self.is_left_out:
            closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if not self.is_left_out:
            scheduler.step()


def fitted(
    pipeline: dict[str, Any] | None, module: Poisoned, samples: int = 32, **options: Any
) -> tuple[dict[str, Tensor], list[float], int, pl.Trainer]:
    run = trainer(pipeline, **options)
    run.fit(module, loader(samples))
    return weights(module), module.rates, getattr(run.strategy, "skipped_steps", 0), run


def skipping(name: str, stages: int, accumulate: int = 1, replicas: int = 1, only: str = "") -> Any:
    pipeline = {"stages": stages, "num_microbatches": min(stages, 2), "data_parallel_size": replicas}
    pipeline |= {"on_nonfinite": "skip"}
    *found, _ = fitted(pipeline, Poisoned(name, only), 32 * replicas, accumulate_grad_batches=accumulate)
    return found


@pytest.mark.parametrize(("name", "accumulate"), [(FIRST, 1), (LAST, 1), (FIRST, 2)])
def test_a_step_that_one_stage_cannot_take_is_left_out_by_all(
    ranks: Ranks, name: str, accumulate: int
) -> None:
    expected, rates, _, _ = fitted(None, LeavesOut(name), accumulate_grad_batches=accumulate)
    found = ranks(2)(skipping, name, 2, accumulate)
    for found_weights, found_rates, skipped in found:
        torch.testing.assert_close(found_weights, expected, rtol=1e-10, atol=1e-12)
        assert found_rates == pytest.approx(rates)
        assert skipped == 1


def test_one_stage_leaves_the_step_out_too() -> None:
    expected, rates, _, _ = fitted(None, LeavesOut(FIRST))
    found_weights, found_rates, skipped = skipping(FIRST, 1)
    assert all(torch.equal(found_weights[name], expected[name]) for name in expected)
    assert (found_rates, skipped) == (rates, 1)


def test_a_step_that_one_replica_cannot_take_is_left_out_by_all(ranks: Ranks) -> None:
    everywhere = ranks(4)(skipping, FIRST, 2, 1, 2)
    somewhere = ranks(4)(skipping, FIRST, 2, 1, 2, "3")
    for (one, rates, skipped), (other, other_rates, also) in zip(everywhere, somewhere, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(bool(torch.isfinite(value).all()) for value in one.values())
        assert (rates, skipped) == (other_rates, also)
        assert skipped == 1


class ByHand(LeavesOut):
    """In manual optimization; on one device the step is left out by hand, as a schedule by hand goes on."""

    def __init__(self, name: str, only: str = "") -> None:
        super().__init__(name, only)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.leaves_out_by_hand and (self.trainer.current_epoch, batch_idx) == POISONED:
            return
        optimizer.step()

    leaves_out_by_hand = False
    optimizer_step = pl.LightningModule.optimizer_step


class LeftOutByHand(ByHand):
    leaves_out_by_hand = True


def skipping_whole(kind: type[Poisoned], name: str, replicas: int, options: dict[str, Any]) -> Any:
    pipeline = {"stages": 2, "data_parallel_size": replicas, "on_nonfinite": "skip"}
    *found, _ = fitted({**pipeline, **options}, kind(name), 32 * replicas)
    return found


@pytest.mark.parametrize("name", [LAST, FIRST])
def test_steps_that_run_whole_and_by_hand_are_left_out_by_all(ranks: Ranks, name: str) -> None:
    expected, rates, _, _ = fitted(None, LeavesOut(name))
    for found_weights, found_rates, skipped in ranks(2)(
        skipping_whole, Poisoned, name, 1, {"whole_steps": True}
    ):
        torch.testing.assert_close(found_weights, expected, rtol=1e-10, atol=1e-12)
        assert (found_rates, skipped) == (pytest.approx(rates), 1)
    expected, _, _, _ = fitted(None, LeftOutByHand(name))
    alone = skipping_whole(ByHand, name, 1, {"stages": 1})
    for found_weights, _, skipped in [alone, *ranks(2)(skipping_whole, ByHand, name, 1, {})]:
        torch.testing.assert_close(found_weights, expected, rtol=1e-10, atol=1e-12)
        assert skipped == 1


def test_replicas_leave_a_whole_step_out_together(ranks: Ranks) -> None:
    found = ranks(4)(skipping_whole, Poisoned, FIRST, 2, {"whole_steps": True})
    for weights_found, _, skipped in found:
        assert all(torch.equal(weights_found[name], found[0][0][name]) for name in weights_found)
        assert all(bool(torch.isfinite(value).all()) for value in weights_found.values())
        assert skipped == 1


def averaging(pipeline: dict[str, Any] | None) -> Any:
    """Finite on every replica, and beyond the largest number in the sum over them."""
    module = Poisoned(FIRST, factor=torch.finfo(torch.float64).max)
    return fitted(pipeline, module, 64 if pipeline else 32, max_epochs=1)[:3]


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_gradients_whose_sum_over_replicas_overflows_are_averaged(ranks: Ranks, policy: str) -> None:
    pipeline = {"stages": 2, "num_microbatches": 2, "data_parallel_size": 2, "on_nonfinite": policy}
    expected = averaging(None)[0]
    for found, _, skipped in ranks(4)(averaging, pipeline):
        assert skipped == 0
        assert all(bool(torch.isfinite(value).all()) for value in found.values())
        assert found[FIRST].shape == expected[FIRST].shape


def raising(stages: int, **pipeline: Any) -> tuple[str, list[Tensor]]:
    module = Poisoned(FIRST)
    run = trainer({"stages": stages, "num_microbatches": min(stages, 2), "on_nonfinite": "raise", **pipeline})
    kept: list[Tensor] = []

    class Keeps(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            listed = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            kept.extend(p.detach().clone() for p in listed if not is_placeholder(p))

    run.callbacks.append(Keeps())  # type: ignore[attr-defined]  # set by a connector
    with pytest.raises(NonFiniteError) as caught:
        run.fit(module, loader(32))
    return str(caught.value), kept


def raising_whole(stages: int) -> tuple[str, list[Tensor]]:
    return raising(stages, whole_steps=True)


@pytest.mark.parametrize("run", [raising_whole, raising])
def test_raise_names_rank_stage_and_parameter_on_all_ranks(ranks: Ranks, run: Any) -> None:
    before, _, _, _ = fitted(None, Poisoned(FIRST), limit_train_batches=1, max_epochs=1)
    for text, kept in ranks(2)(run, 2):
        assert f"that of {FIRST} on pipeline rank 0 (global rank 1, stage 0). No weight was changed" in text
        assert kept
        for value in kept:
            same = [one for one in before.values() if one.shape == value.shape]
            assert any(torch.allclose(value, one, rtol=1e-10, atol=1e-12) for one in same)
    assert "that of net.0.weight on global rank 0" in run(1)[0]


def ignoring() -> Any:
    return fitted({"stages": 2, "num_microbatches": 2}, Poisoned(FIRST))[0]


def test_ignore_is_what_one_device_does(ranks: Ranks) -> None:
    expected = fitted(None, Poisoned(FIRST))[0]
    for found in ranks(2)(ignoring):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
        assert bool(found[FIRST].isnan().all())


def exchanges(policy: str, replicas: int) -> int:
    """Collectives that a fit starts, steps of several stages included."""
    pipeline = {"stages": 2, "num_microbatches": 2, "data_parallel_size": replicas, "on_nonfinite": policy}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fitted(pipeline, Poisoned(FIRST, "nobody"), limit_train_batches=3, max_epochs=1)
    return sum(event.count for event in profile.key_averages() if event.key.startswith("gloo:"))


def test_nothing_more_is_sent_for_it(ranks: Ranks) -> None:
    ignored = ranks(4)(exchanges, "ignore", 2)
    assert min(ignored) > 8
    assert ranks(4)(exchanges, "skip", 2) == ignored
