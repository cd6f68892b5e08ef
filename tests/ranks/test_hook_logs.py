"""What hooks log is that of one device on every rank, or refused with key and line."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_pipeline.errors import PipelineError, SplitError
from lightning_pipeline.ranks import Company
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]
PIPELINE = {"stages": 2, "num_microbatches": 4}


class LogsWeights(Regression):
    """Weights and gradients of the first and the last layer, which are on different stages."""

    def on_after_backward(self) -> None:
        for number in (0, 6):
            gradient = self.net[number].weight.grad
            if gradient is not None:
                self.log(f"g{number}", gradient.norm(), on_step=True, on_epoch=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log_dict({"w0": self.net[0].weight.norm(), "w6": self.net[6].weight.norm()})
        self.log("batch", float(self.global_step), on_epoch=True)

    def on_train_epoch_end(self) -> None:
        for name, parameter in self.named_parameters():
            self.log(f"norm/{name}", parameter.detach().norm())

    def on_validation_batch_end(self, *args: Any) -> None:
        self.log("during_validation", self.net[0].weight.norm() + len(args[1][0]))

    def on_validation_epoch_end(self) -> None:
        self.log("at_its_end", self.net[0].bias.sum())


class GradientsByLayer(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear) and part.weight.grad is not None:
                module.log(f"grad/{name}", part.weight.grad.norm())
                self.log(f"mine/{name}", part.weight.grad.norm(), on_step=False, on_epoch=True)


class WeightNorm(Regression):
    def on_train_epoch_end(self) -> None:
        self.log("norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm())


class CountsParameters(Regression):
    def on_train_epoch_start(self) -> None:
        self.log("size", float(sum(p.numel() for p in self.parameters())))


class Monitored(CountsParameters):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "size"}}


class LogsTheRank(Regression):
    def on_train_epoch_start(self) -> None:
        self.log("size", float(self.trainer.global_rank))


class MonitorsTheRank(LogsTheRank, Monitored):
    pass


class Mixes(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("ratio", self.net[0].weight.norm() / self.net[6].weight.norm())


class TwoLoaders(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("first", self.net[0].weight.sum() + batch_idx)
        self.log("last", self.net[6].weight.sum() + batch_idx)


class EachBatch(Regression):
    def on_validation_batch_end(self, *args: Any) -> None:
        self.log("last", self.net[6].weight.sum(), on_step=True)


class Freezes(Regression):
    """Layers of every stage are frozen one by one."""

    def on_train_epoch_start(self) -> None:
        for number in (0, 6):
            self.net[number].weight.requires_grad_(self.current_epoch > 0)


class OwnPerRank(Regression):
    """A value that differs between ranks by nature."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("rank", float(self.trainer.global_rank), rank_zero_only=True)


def fit_with_callback(pipeline: dict[str, Any] | None, folder: str) -> Any:
    return fit(pipeline, LogsWeights, callbacks=[GradientsByLayer()], writes=folder)


@pytest.mark.parametrize("stages", [2, 3])
def test_what_one_stage_alone_has_is_logged_on_every_rank(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    expected = fit_with_callback(None, str(tmp_path / "one"))
    assert {"g0_epoch", "w0", "w6", "norm/net.0.weight", "during_validation", "mine/net.0"} <= set(
        expected[1]
    )
    pipeline = {"stages": stages, "num_microbatches": 4}
    for found in ranks(stages)(fit_with_callback, pipeline, str(tmp_path / "stages")):
        assert_same(found, expected)


@pytest.mark.parametrize("cls", [WeightNorm, Monitored, EachBatch, Mixes])
def test_a_value_of_several_stages_is_logged_as_on_one_device(ranks: Ranks, tmp_path: Path, cls: Any) -> None:
    expected = fit(None, cls, writes=str(tmp_path / "one"))
    for found in ranks(2)(partial(fit, writes=str(tmp_path / "two")), PIPELINE, cls):
        assert_same(found, expected)


def test_a_value_that_ranks_disagree_about_is_refused(ranks: Ranks) -> None:
    outcomes = ranks(2).outcomes(fit, PIPELINE, MonitorsTheRank)
    assert not any(outcome.ok or outcome.hung for outcome in outcomes)
    assert any(isinstance(outcome.error, SplitError) for outcome in outcomes)
    text = r"self.log\('size', ...\) in on_train_epoch_start got different values"
    for outcome in outcomes:
        with pytest.raises(PipelineError, match=rf"(?s){text}.*test_hook_logs.py:\d+ in on_.*TheRank"):
            raise outcome.error


def warnings_of(cls: type[Regression]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(PIPELINE, cls)
    return [str(one.message) for one in caught if "got different values" in str(one.message)]


def test_numbers_that_decide_nothing_may_differ_and_one_warning_says_so(ranks: Ranks) -> None:
    texts = [text for found in ranks(2)(warnings_of, LogsTheRank) for text in found]
    assert len(texts) == 1
    assert "1 on pipeline rank" in texts[0]
    assert "rank_zero_only=True" in texts[0]
    assert "test_hook_logs.py" in texts[0]


def fit_two(pipeline: dict[str, Any] | None) -> Any:
    module, run = TwoLoaders(), trainer(pipeline)
    run.fit(module, loader(), [loader(seed=4), loader(seed=5)])
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


def test_each_loader_of_an_evaluation_has_its_own_values(ranks: Ranks) -> None:
    expected = fit_two(None)
    assert {"first/dataloader_idx_0", "last/dataloader_idx_1"} <= set(expected[1])
    for found in ranks(2)(fit_two, PIPELINE):
        assert_same(found, expected)


def test_layers_of_other_stages_can_be_frozen(ranks: Ranks) -> None:
    expected = fit(None, Freezes)
    for found in ranks(2)(fit, PIPELINE, Freezes):
        assert_same(found, expected)


def test_a_value_of_each_ranks_own_may_be_logged_by_rank_zero(ranks: Ranks) -> None:
    expected = fit(None, OwnPerRank)
    assert_same(ranks(2)(fit, PIPELINE, OwnPerRank)[0], expected)


def gathers(cls: type[Regression]) -> int:
    """How often the ranks gathered between the start of the second epoch and the end of the third."""
    calls: list[int] = []
    gather = Company.gather

    class Counts(pl.Callback):
        def on_train_batch_start(self, run: pl.Trainer, *args: Any) -> None:
            calls.append(0)

    def counted(self: Company, what: str, own: Any) -> dict[int, Any]:
        calls.append(1)
        return gather(self, what, own)

    Company.gather = counted  # type: ignore[method-assign, assignment]
    try:
        run = trainer(PIPELINE, max_epochs=1, callbacks=[Counts()])
        run.fit(cls(), loader(samples=80))
    finally:
        Company.gather = gather  # type: ignore[method-assign]
    starts = [index for index, call in enumerate(calls) if not call]
    return sum(calls[starts[4] : starts[8]])


def test_a_batch_without_logs_in_hooks_needs_no_further_collective(ranks: Ranks) -> None:
    assert ranks(2)(gathers, Regression) == [0, 0]
    # in four batches: which gradients there are, the values in each of two hooks, and the end
    assert ranks(2)(gathers, LogsWeights) == [16, 16]
