"""Several replicas of one stage are DDP; what one stage saved goes on over two, and the other way round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]
ONE, TWO = {"stages": 1}, {"stages": 2, "num_microbatches": 1}


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss, sync_dist=True)


def replicated(plain: bool, by_hand: bool, accumulate: int) -> Any:
    """Weights and logs on this rank, and the world size."""
    strategy = DDPStrategy() if plain else PipelineStrategy(stages=1, data_parallel_size=2)
    module = ByHand() if by_hand else Regression()
    run = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulate, callbacks=[] if plain else [BubbleMonitor()],
    )  # fmt: skip
    run.fit(module, loader(shuffle=True), loader(seed=4))
    logs = {k: float(v) for k, v in run.callback_metrics.items() if not k.startswith("pipeline/")}
    return weights(module), logs


@pytest.mark.parametrize(("by_hand", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_replicas_of_one_stage_are_ddp(ranks: Ranks, by_hand: bool, accumulate: int) -> None:
    found = ranks(2)(replicated, False, by_hand, accumulate)
    expected = ranks(2)(replicated, True, by_hand, accumulate)
    for own, plain in zip(found, expected, strict=True):
        assert_same(own, plain, tolerance=0)


def fit_from(pipeline: dict[str, Any], folder: str, epochs: int, start: str | None) -> Any:
    torch.manual_seed(5)
    module = Regression()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    run = trainer(pipeline, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, loader(shuffle=True), ckpt_path=start, weights_only=False)
    return weights(module)


@pytest.mark.parametrize(("first", "then"), [(ONE, TWO), (TWO, ONE)], ids=["1to2", "2to1"])
def test_a_checkpoint_goes_on_in_mid_epoch_with_another_number_of_stages(
    ranks: Ranks, tmp_path: Path, first: dict[str, Any], then: dict[str, Any]
) -> None:
    whole = ranks(first["stages"])(fit_from, first, str(tmp_path / "first"), 3, None)
    start = str(tmp_path / "first" / "step=4.ckpt")
    assert Path(start).is_dir() == (first is TWO)
    resumed = ranks(then["stages"])(fit_from, then, str(tmp_path / "then"), 3, start)
    torch.testing.assert_close(resumed[0], whole[0], rtol=1e-10, atol=1e-10)


class Normalised(Regression):
    """Its running statistics are buffers, and its loss goes by one that the step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(self.net[0].out_features).double())
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + self.mean)
        self.mean.mul_(0.9).add_(0.1 * batch[1].mean().abs())
        return loss


def normalised(pipeline: dict[str, Any] | None, accumulate: int) -> Any:
    """On two replicas of these stages, or of DDP."""
    strategy = DDPStrategy() if pipeline is None else PipelineStrategy(**pipeline, data_parallel_size=2)
    run = pl.Trainer(
        accelerator="cpu", devices=2 if pipeline is None else 2 * pipeline["stages"], strategy=strategy,
        max_epochs=2, logger=False, enable_checkpointing=False, log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    module = Normalised()
    run.fit(module, loader(shuffle=True), loader(seed=4))
    found = {name: value.clone() for name, value in module.named_buffers() if "num_batches" not in name}
    return {**weights(module), **found}, {"val_loss": float(run.callback_metrics["val_loss"])}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_replicas_have_the_buffers_of_the_first_one_as_under_ddp(ranks: Ranks, accumulate: int) -> None:
    expected = ranks(2)(normalised, None, accumulate)[0]
    found = ranks(4)(normalised, {"stages": 2, "num_microbatches": 1}, accumulate)
    assert_same(found[0], expected, tolerance=1e-10)
