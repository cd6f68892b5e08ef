"""What a step reads off its Trainer, and how it may end, is as on one device, while it is traced too."""

import io
import logging
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core import rank_zero
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]

TWO = {"stages": 2, "num_microbatches": 2}


class Reads(Regression):
    """Logs its learning rate in every way, and what else a Trainer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.log("batches", float(len(self.trainer.train_dataloader)))  # type: ignore[arg-type]
        self.log("samples", float(len(self.trainer.train_dataloader.dataset)))  # type: ignore[union-attr]
        self.log("lr", optimizer.param_groups[0]["lr"])
        self.log("lr_again", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("lr_scheduled", self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr]
        self.log("global_step", float(self.trainer.global_step))
        self.log("known", float(self.trainer.callback_metrics.get("train_loss_epoch", -1.0)))
        self.log("dir", float(len(str(self.trainer.log_dir))))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.places.append(self.trainer.log_dir)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def reads(pipeline: dict[str, Any] | None, folder: str) -> Any:
    module = Reads()
    run = trainer(pipeline, writes=True, default_root_dir=folder)
    run.fit(module, loader(24), loader(seed=4))
    return (weights(module), {k: float(v) for k, v in run.callback_metrics.items()}), module.places


def test_a_step_reads_its_learning_rate_and_its_trainer(ranks: Ranks, tmp_path: Path) -> None:
    expected, _ = reads(None, str(tmp_path / "one"))
    (first, places), (second, others) = ranks(2)(reads, TWO, str(tmp_path / "two"))
    assert_same(first, expected)
    assert_same(second, expected)
    assert places == others


class Counts(Callback):
    """The user's first callback."""

    steps = 0


class FindsItsCallbacks(Regression):
    """By their place among all, in the step and in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[str]] = []

    def look(self) -> None:
        self.found.append([type(one).__name__ for one in self.trainer.callbacks])  # type: ignore[attr-defined]

    on_fit_start = on_train_start = on_train_epoch_start = on_train_epoch_end = on_train_end = look

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.callbacks[0].steps += 1  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


def callbacks_found(pipeline: dict[str, Any] | None) -> Any:
    module, counts = FindsItsCallbacks(), Counts()
    run = trainer(pipeline, callbacks=[counts])
    run.fit(module, loader(32))
    module.look()
    return module.found, counts.steps


@pytest.mark.parametrize("options", [{}, {"data_parallel_size": 2}])
def test_the_trainers_callbacks_are_the_users(ranks: Ranks, options: dict[str, int]) -> None:
    names, steps = callbacks_found(None)
    assert names[0][0] == "Counts"
    replicas = options.get("data_parallel_size", 1)
    for found in ranks(2 * replicas)(callbacks_found, {**TWO, **options}):
        assert found == (names, steps // replicas)


class ClearsWhereNothingIsWrong(FindsItsCallbacks):
    """As disent's frameworks, which end a run that has gone astray: runs ahead of a batch look into it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            loss = super().training_step(batch, batch_idx)
            if loss > 1e20:
                raise ValueError("out of bounds")
        except Exception:
            self.trainer.callbacks.clear()  # type: ignore[attr-defined]
            raise
        if loss > 1e20:
            self.trainer.callbacks.pop()  # type: ignore[attr-defined]
        return loss


def callbacks_left(pipeline: dict[str, Any] | None) -> Any:
    module, counts = ClearsWhereNothingIsWrong(), Counts()
    run = trainer(pipeline, callbacks=[counts])
    run.fit(module, loader(32))
    return [type(one).__name__ for one in run.callbacks], counts.steps  # type: ignore[attr-defined]


def test_a_branch_that_is_not_taken_leaves_the_callbacks(ranks: Ranks) -> None:
    expected = callbacks_left(None)
    assert "Counts" in expected[0]
    for found in ranks(2)(callbacks_left, TWO):
        assert found == expected


class StopsItself(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class StopsAtOnce(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def stops(pipeline: dict[str, Any] | None, kind: str) -> Any:
    module, run = {"later": StopsItself, "at once": StopsAtOnce}[kind](), trainer(pipeline)
    run.fit(module, loader(24), loader(seed=4))
    return (weights(module), {k: float(v) for k, v in run.callback_metrics.items()}), run.global_step


@pytest.mark.parametrize("kind", ["later", "at once"])
def test_a_step_that_asks_to_stop_is_the_last(ranks: Ranks, kind: str) -> None:
    expected, steps = stops(None, kind)
    for found, made in ranks(2)(stops, TWO, kind):
        assert made == steps
        assert_same(found, expected)


class KnowsItsMode(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training
        assert not self.net.training
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training
        self.log("test_loss", self.loss(batch))


def evaluated(pipeline: dict[str, Any] | None) -> Any:
    module, run = KnowsItsMode(), trainer(pipeline)
    (validated,) = run.validate(module, loader(seed=4), verbose=False)
    assert module.training
    (tested,) = run.test(module, loader(seed=4), verbose=False)
    return validated, tested


def test_an_evaluation_is_traced_in_its_mode(ranks: Ranks) -> None:
    expected = evaluated(None)
    for found in ranks(2)(evaluated, TWO):
        assert_same(({}, found[0]), ({}, expected[0]))
        assert_same(({}, found[1]), ({}, expected[1]))


class NoLoader(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        super().validation_step(batch, batch_idx)


class TwoLoaders(Regression):
    pass


class TwoOptimizers(Regression):
    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class Unknown(Regression):
    def training_step(self, batch: Any, batch_idx: int, extra: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class NoStep(Regression):
    training_step = pl.LightningModule.training_step  # type: ignore[assignment]


class NoOptimizers(Regression):
    configure_optimizers = pl.LightningModule.configure_optimizers


SIGNATURES: dict[str, Callable[[Any], object]] = {
    "no loader": lambda run: run.validate(NoLoader(), loader(), verbose=False),
    "two loaders": lambda run: run.validate(TwoLoaders(), [loader(), loader()], verbose=False),
    "two optimizers": lambda run: run.fit(TwoOptimizers(), loader()),
    "unknown": lambda run: run.fit(Unknown(), loader()),
    "no step": lambda run: run.fit(NoStep(), loader()),
    "no optimizers": lambda run: run.fit(NoOptimizers(), loader()),
    "a number for a loader": lambda run: run.fit(Regression(), 5),
    "a number beside a loader": lambda run: run.validate(Regression(), [loader(), 5], verbose=False),
}


def wrong_signature(pipeline: dict[str, Any] | None, kind: str) -> tuple[str, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # one device says which
        SIGNATURES[kind](trainer(pipeline))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_wrong_signature_is_explained_as_on_one_device(ranks: Ranks, kind: str) -> None:
    expected = wrong_signature(None, kind)
    for found in ranks(2)(wrong_signature, TWO, kind):
        assert found == expected


class Outputs(Callback):
    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(sorted(outputs))


class SometimesNone(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def without_loss(pipeline: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    module, outputs = SometimesNone(), Outputs()
    run = trainer(pipeline, callbacks=[outputs], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, loader(24), loader(seed=4))
    told = [str(one.message) for one in caught if "returned" in str(one.message)]
    return (weights(module), {k: float(v) for k, v in run.callback_metrics.items()}), outputs.seen, told


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_step_that_returns_none_is_skipped(ranks: Ranks, options: dict[str, Any]) -> None:
    expected, seen, _ = without_loss(None, options)
    assert [] in seen
    results = ranks(2)(without_loss, TWO, options)
    for found, outputs, _ in results:
        assert_same(found, expected)
        assert outputs == seen
    if not options:
        told = [one for _, _, said in results for one in said]
        assert any("returned `None`" in one for one in told)  # once per process, as Lightning says it
        assert sum("no loss for any of a batch's 2 micro-batches" in one for one in told) == 1


class Fails(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 2:
            raise ValueError("the data are wrong")
        return super().training_step(batch, batch_idx)


def fails_in_search(pipeline: dict[str, Any], folder: str) -> None:
    run = trainer(
        pipeline, max_steps=20, max_epochs=-1, default_root_dir=folder,
        callbacks=[LearningRateFinder(num_training_steps=8)],
    )  # fmt: skip
    run.fit(Fails(), loader(40))


def test_an_error_in_the_search_for_a_learning_rate_is_the_users(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2).outcomes(fails_in_search, TWO, str(tmp_path))
    assert all("the data are wrong" in str(outcome.error) for outcome in outcomes)
    assert not list(tmp_path.glob(".lr_find*"))


class Prints(Regression):
    """In every way."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("step", batch_idx)
        print("all ranks", batch_idx)
        print("all ranks", batch_idx, "again")
        print("all ranks", batch_idx)
        rank_zero_info(f"told {batch_idx}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.print("validation", batch_idx)
        super().validation_step(batch, batch_idx)


class PrintsItself(ProgressBar):
    """Not to the standard output."""

    is_enabled = True

    def __init__(self, out: io.StringIO) -> None:
        super().__init__()
        self._out = out

    def disable(self) -> None:
        """Where it is not rank 0's."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._out.write(" ".join(map(str, args)) + "\n")


def printed(pipeline: dict[str, Any] | None) -> list[str]:
    out, told = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(told)
    loggers = [rank_zero.log]  # named by whichever of Lightning's packages was imported last
    for one in loggers:
        one.addHandler(handler)
    try:
        with redirect_stdout(out):
            bar = PrintsItself(out)
            run = trainer(pipeline, callbacks=[bar], enable_model_summary=False, max_epochs=1)
            run.fit(Prints(), loader(24), loader(seed=4))
    finally:
        for one in loggers:
            one.removeHandler(handler)
    lines = [*out.getvalue().splitlines(), *told.getvalue().splitlines()]
    return [line for line in lines if line.startswith(("step ", "all ranks ", "told ", "validation "))]


@pytest.mark.parametrize("number", [1, 4])
def test_a_step_prints_once(ranks: Ranks, number: int) -> None:
    expected = printed(None)
    assert "step 0" in expected
    first, second = ranks(2)(printed, {"stages": 2, "num_microbatches": number})
    assert first == expected
    assert second == [line for line in expected if line.startswith("all ranks")]


class CollectsWhatItValidates(Regression):
    """Not in the Trainer's check before training, where the first sort may not even call the model."""

    def __init__(self, always_calls: bool) -> None:
        super().__init__()
        self.always_calls = always_calls
        self.outs: list[Tensor] = []
        self.seen: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.sanity_checking and not self.always_calls:
            return
        out = self.net(batch[0])
        if not self.trainer.sanity_checking:
            self.outs.append(out.detach())
        self.log("val_loss", torch.nn.functional.mse_loss(out, batch[1]))

    def on_validation_epoch_end(self) -> None:
        if self.outs:
            self.seen.append(torch.cat(self.outs).clone())
            self.outs.clear()


def validated(pipeline: dict[str, Any] | None, always_calls: bool) -> list[Tensor]:
    module = CollectsWhatItValidates(always_calls)
    trainer(pipeline).fit(module, loader(24), loader(seed=4))
    return module.seen


@pytest.mark.parametrize("always_calls", [True, False], ids=["calls", "returns"])
def test_validation_is_not_what_the_check_before_training_was(ranks: Ranks, always_calls: bool) -> None:
    expected = validated(None, always_calls)
    assert len(expected) == 2
    for seen in ranks(2)(validated, TWO, always_calls):
        torch.testing.assert_close(seen, expected)


class ReadsItsLogs(Regression):
    """Asks its Trainer for what it has logged just before, and weighs its loss by that."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "rows": float(len(batch[0]))}, on_step=True, on_epoch=True)
        self.log("bar", loss.detach().sqrt(), prog_bar=True, logger=False)
        known = self.trainer.callback_metrics
        self.log("step", known["loss_step"] + known["loss"])
        self.log("shown", self.trainer.progress_bar_metrics["bar"] * 2)
        self.log("hidden", float("bar" in self.trainer.logged_metrics))
        return loss * (0.5 if known.get("loss", 9.0) > 1.2 else 1.0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), on_step=True, on_epoch=True)
        ending = f"/dataloader_idx_{dataloader_idx}"
        self.log("again", self.trainer.logged_metrics[f"val_step{ending}"] * 3)
        self.log("unseen", float(f"val_step{ending}" in self.trainer.callback_metrics))


def reads_its_logs(pipeline: dict[str, Any] | None) -> Any:
    module, run = ReadsItsLogs(), trainer(pipeline)
    run.fit(module, loader(), [loader(seed=4), loader(seed=5)])
    return weights(module), {k: float(v) for k, v in run.callback_metrics.items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_finds_what_it_has_logged(ranks: Ranks, stages: int) -> None:
    expected = reads_its_logs(None)
    for found in ranks(stages)(reads_its_logs, {**TWO, "stages": stages}):
        assert_same(found, expected)


def test_one_device_is_what_this_file_compares_with() -> None:
    assert isinstance(trainer(None).strategy, pl.strategies.SingleDeviceStrategy)
