"""What modules log and measure is right on every rank, however they do it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score

from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Classifier(pl.LightningModule):
    """Metrics logged as objects, as values, in collections, and computed by hand in a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
        ).double()
        self.accuracy = BinaryAccuracy()
        self.by_hand = BinaryAccuracy()
        self.ranking = BinaryAUROC()
        self.many = MetricCollection([BinaryF1Score(), BinaryAccuracy()], prefix="many_")
        self.computed: list[float] = []

    def step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        score = self.net(batch[0]).squeeze(1)
        label = (batch[1].sum(1) > 0).long()
        loss = nn.functional.binary_cross_entropy_with_logits(score, label.double())
        return score.sigmoid(), label, loss  # torchmetrics guesses, per call, what logits are

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        score, label, loss = self.step(batch)
        self.log("in_step", self.accuracy(score, label), on_step=False, on_epoch=True)
        self.log("object", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "score": score}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if getattr(self.trainer.strategy, "has_last_stage", True):
            assert outputs["score"].shape == (len(batch[0]),)
        self.log("loss_again", outputs["loss"], on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        score, label, loss = self.step(batch)
        self.by_hand.update(score, label)
        self.ranking.update(score, label)
        self.many.update(score, label)
        self.log("val_loss", loss, prog_bar=True)
        self.log_dict(self.many)

    def on_validation_epoch_end(self) -> None:
        self.log("val_by_hand", self.by_hand.compute())
        self.log("val_ranking", self.ranking.compute())
        self.by_hand.reset()
        self.ranking.reset()

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        score, _, loss = self.step(batch)
        self.log("test_loss", loss)
        return {"score": score, "names": [f"{float(s):.9f}" for s in score], "count": len(score)}

    def on_test_batch_end(self, outputs: Any, *_: Any) -> None:
        self.computed += [float(outputs["score"].sum()), float(len(outputs["names"])), outputs["count"]]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def run_classifier(pipeline: dict[str, Any] | None, folder: str) -> Any:
    module = Classifier()
    logger = CSVLogger(folder, name="log", version="0")
    run = trainer(
        pipeline, logger=logger, max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})]
    )
    run.fit(module, loader(24), [loader(20, seed=4), loader(9, seed=5)])
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    tested = run.test(module, loader(20, seed=6), verbose=False)[0]
    return (weights(module), {**logged, **tested}), module.computed


def test_metrics_and_hooks_log_what_one_device_logs(ranks: Ranks, tmp_path: Path) -> None:
    expected, computed = run_classifier(None, str(tmp_path / "one"))
    results = ranks(2)(run_classifier, {"stages": 2, "num_microbatches": 4}, str(tmp_path / "two"))
    for found, _ in results:
        for name in ("in_step", "object_step", "object_epoch"):  # means of micro-batches of equal sizes
            assert found[1][name] == pytest.approx(expected[1][name], rel=1e-6)
        assert_same(found, expected, 1e-6)
    for _, found in results:  # every rank is told what evaluated batches return
        assert found == pytest.approx(computed)
    lines = [
        (tmp_path / part / "log" / "0" / "metrics.csv").read_text().splitlines() for part in ("one", "two")
    ]
    assert len(lines[0]) == len(lines[1])
    assert sorted(lines[0][0].split(",")) == sorted(lines[1][0].split(","))


def metrics_of_replicas() -> Any:
    module = Classifier()
    run = trainer({"stages": 2, "data_parallel_size": 2, "num_microbatches": 2})
    return run.validate(module, loader(16, batch_size=4), verbose=False)[0]


def test_metrics_gather_over_replicas(ranks: Ranks) -> None:
    one = trainer(None).validate(Classifier(), loader(16, batch_size=4), verbose=False)[0]
    for found in ranks(4)(metrics_of_replicas):
        for name in ("val_by_hand", "val_ranking", "many_BinaryF1Score"):
            assert found[name] == pytest.approx(one[name], rel=1e-6), name


class Custom(Regression):
    """A batch that only the user knows how to split, an early optimizer, and a value per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        x, y = batch
        halves = [slice(None, None, 2), slice(1, None, 2)] if len(x) > 1 else [slice(None)]
        return [(x[half].contiguous(), y[half].contiguous()) for half in halves]

    def merge_outputs(self, outputs: list[Any], sizes: list[int]) -> Any:
        return [outputs, sizes]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return float(self.net(batch[0]).sum())

    def configure_optimizers(self) -> Any:
        return self.optimizer


def run_custom(pipeline: dict[str, Any] | None) -> Any:
    module = Custom()
    run = trainer(pipeline, max_epochs=1, fast_dev_run=2)
    run.fit(module, loader(num_workers=1, persistent_workers=True), loader(seed=4))
    held = sum(len(group["params"]) for group in run.optimizers[0].param_groups)
    return (weights(module), {}), run.predict(module, loader(8))[0], held


def test_a_module_may_split_and_merge_itself_and_bring_its_optimizer(ranks: Ranks) -> None:
    expected, _, held = run_custom(None)
    results = ranks(2)(run_custom, {"stages": 2, "num_microbatches": 5})
    for found, _, _ in results:
        assert_same(found, expected)
    assert len(results[0][1][0]) == 2
    assert results[0][1][1] == [4, 4]
    assert [part for *_, part in results] == [held, held]


def places() -> Any:
    run = trainer(
        {"stages": 2, "data_parallel_size": 2},
        barebones=True,
        log_every_n_steps=None,
        num_sanity_val_steps=None,
    )
    seen = {}

    class Looks(Regression):
        def configure_optimizers(self) -> Any:
            mesh = self.device_mesh
            own = set(map(id, run.strategy.own_parameters()))
            named = [name for name, parameter in self.named_parameters() if id(parameter) in own]
            seen["names"] = sorted({name.split(".")[1] for name in named})
            seen["mesh"] = (mesh.mesh_dim_names, mesh.mesh.tolist())
            seen["table"] = str(run.strategy.describe())
            return super().configure_optimizers()

    run.fit(Looks(), loader())
    strategy: Any = run.strategy
    return (
        seen,
        [strategy.stage_index(rank) for rank in range(4)],
        strategy.stages_here,
        strategy.replica_index,
    )


def test_ranks_know_their_places(ranks: Ranks) -> None:
    results = ranks(4)(places)
    for rank, (seen, stages, here, replica) in enumerate(results):
        assert seen["mesh"] == (("pp", "dp"), [[2, 3], [0, 1]])
        assert seen["names"] == (["4", "6"] if rank < 2 else ["0", "2"])
        assert "net.4, net.6" in seen["table"]
        assert stages == [1, 1, 0, 0]
        assert (here, replica) == ((stages[rank],), rank % 2)


class Augmented(Regression):
    """Draws while the batch moves, and in the loader's main process."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + torch.randn_like(batch[0]), batch[1]


def run_augmented() -> list[float]:
    module = Augmented()
    run = trainer({"stages": 2, "num_microbatches": 2}, max_epochs=2)
    run.fit(module, loader())
    return [float(run.callback_metrics["train_loss_step"]), float(run.callback_metrics["train_loss_epoch"])]


def test_augmentation_while_batches_move_is_alike_on_all_stages(ranks: Ranks) -> None:
    first, second = ranks(2)(run_augmented)
    assert first == second


class LogsNoMeans(Regression):
    """Roots, exponentials and extremes, of each step, in training and validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = nn.functional.mse_loss(out, batch[1])
        self.log("root", loss.sqrt(), on_step=True, on_epoch=True)
        self.log_dict({"exp": torch.exp(loss), "worst": (out - batch[1]).abs().max()}, on_epoch=True)
        self.log("batches", 1.0, reduce_fx="sum", on_step=False, on_epoch=True, batch_size=len(out))
        self.log("samples", float(len(out)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("size", torch.tensor(float(len(out))))
        self.log("sum_of_losses", loss, reduce_fx="sum", on_step=False, on_epoch=True, batch_size=len(out))
        self.log("above", torch.count_nonzero(out > 0).double())
        self.log("largest_loss", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_root", nn.functional.mse_loss(self.net(batch[0]), batch[1]) ** 0.5)


def test_logged_numbers_that_are_no_means_are_those_of_one_device(ranks: Ranks, tmp_path: Path) -> None:
    expected = fit(None, LogsNoMeans, writes=str(tmp_path / "one"))
    written = partial(fit, writes=str(tmp_path / "two"))
    for found in ranks(2)(written, {"stages": 2, "num_microbatches": 4}, LogsNoMeans):
        assert_same(found, expected)


class NamesItsLogs(Regression):
    """Overrides what logs, to put a prefix before each name."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(f"own {name}", value, **options)

    def log_dict(self, dictionary: Any, **options: Any) -> None:
        super().log_dict({f"several {name}": 2 * value for name, value in dictionary.items()}, **options)


def test_methods_that_log_may_be_overridden(ranks: Ranks, tmp_path: Path) -> None:
    expected = fit(None, NamesItsLogs, writes=str(tmp_path / "one"))
    assert "own several twice" in expected[1]
    written = partial(fit, writes=str(tmp_path / "two"))
    for found in ranks(2)(written, {"stages": 2, "num_microbatches": 4}, NamesItsLogs):
        assert_same(found, expected)
