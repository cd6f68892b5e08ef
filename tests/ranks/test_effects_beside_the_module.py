"""What a step changes beside its module is after each batch what one device leaves, on every rank."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MeanSquaredError

from lightning_pipeline.model.tensors import code_of
from tests.pool import Pool
from tests.ranks import kept_elsewhere
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]
CASES = pytest.mark.parametrize("num_microbatches", [1, 4])
SEEN = {"batches": 0, "samples": 0}
STEPS = 0
STORE = SimpleNamespace(n=0, inner=SimpleNamespace(samples=0))


class Data(pl.LightningDataModule):
    """Counts what steps do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.kept, self.store = 0, [], SimpleNamespace(n=0)

    def train_dataloader(self) -> Any:
        return loader(24)

    def val_dataloader(self) -> Any:
        return loader(seed=4)


class Counts(Callback):
    """Is counted by steps."""

    def __init__(self) -> None:
        self.n = 0


def counter_of(run: Any) -> Counts:
    return next(callback for callback in run.callbacks if isinstance(callback, Counts))


class Reached(Regression):
    """Counters of everything that a step can reach, before the model and after it, and rates of the optimizer."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        global STEPS
        STEPS += 1
        STORE.n += 1
        STORE.inner.samples += len(batch[0])
        self.trainer.datamodule.store.n += 1  # type: ignore[attr-defined]
        SEEN["batches"] += 1
        SEEN["samples"] += len(batch[0])
        self.trainer.datamodule.k += 1  # type: ignore[attr-defined]
        loss = super().training_step(batch, batch_idx)
        type(self).made += 1
        self.trainer.datamodule.kept.append(loss.item())  # type: ignore[attr-defined]
        counter_of(self.trainer).n += 1
        group = self.trainer.optimizers[0].param_groups[0]
        group["lr"] = 0.1 / (2 + self.trainer.global_step)
        group["momentum"] = min(0.9, 0.5 + loss.item() / 10)
        self.lr_schedulers().step()  # type: ignore[union-attr]
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        data: Any = self.trainer.datamodule
        group = self.trainer.optimizers[0].param_groups[0]
        scheduler: Any = self.lr_schedulers()
        counter = counter_of(self.trainer)
        self.states.append(
            (STEPS, *SEEN.values(), data.k, type(self).made, counter.n, scheduler.last_epoch, group["lr"])
        )
        self.states.append((group["momentum"], STORE.n, STORE.inner.samples, data.store.n))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]


def reached(pipeline: dict[str, Any] | None) -> Any:
    global STEPS
    STEPS, Reached.made = 0, 0
    STORE.n = STORE.inner.samples = 0
    SEEN.update(batches=0, samples=0)
    module, data = Reached(), Data()
    run = trainer(pipeline, callbacks=[Counts()])
    run.fit(module, datamodule=data)

    return (weights(module), {k: float(v) for k, v in run.callback_metrics.items()}), module.states


@CASES
def test_counters_rates_and_schedulers_are_those_of_one_device(ranks: Ranks, num_microbatches: int) -> None:
    expected, states = reached(None)
    for found, others in ranks(2)(reached, {"stages": 2, "num_microbatches": num_microbatches}):
        for one, other in zip(others, states, strict=True):
            assert one == pytest.approx(other, rel=1e-9)
        assert_same(found, expected)


class Unregistered(Regression):
    """Keeps its metrics where PyTorch does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = {"train": MeanSquaredError().set_dtype(torch.float64), "all": [self.error]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.plain["train"].update(out, batch[1])
        return torch.nn.functional.mse_loss(out, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("train_error", self.plain["train"].compute())
        self.plain["train"].reset()


@CASES
def test_a_metric_in_a_plain_dictionary_counts_each_sample_once(ranks: Ranks, num_microbatches: int) -> None:
    expected = fit(None, Unregistered)
    for found in ranks(2)(fit, {"stages": 2, "num_microbatches": num_microbatches}, Unregistered):
        assert_same(found, expected)


class Meter:
    """As in many training scripts: what was last seen, and the mean of all."""

    def __init__(self) -> None:
        self.value = self.total = self.average = 0.0
        self.count = 0

    def update(self, value: float, count: int) -> None:
        self.value = value
        self.total += value * count
        self.count += count
        self.average = self.total / self.count


def kept_around(pipeline: dict[str, Any] | None) -> Any:
    """A step that keeps things in variables of the function around its class, and in other places like that."""
    history: list[float] = []
    recent: deque[float] = deque(maxlen=3)
    counts = {"batches": 0, "samples": 0}
    meters = {"loss": Meter(), "all": [Meter()]}
    batches = 0
    states: list[Any] = []
    lists: list[Any] = []  # of the last stage: on others it raises where a list that units fill is read

    def note(loss: float) -> None:
        history.append(loss)

    class Keeps(Regression):
        def training_step(self, batch: Any, batch_idx: int, seen: Any = []) -> Tensor:  # noqa: B006
            nonlocal batches
            batches += 1
            counts["batches"] += 1
            seen.append(batch_idx)
            loss = super().training_step(batch, batch_idx)
            note(loss.item())
            recent.append(loss.item())
            counts["samples"] += len(batch[0])
            meters["loss"].update(loss.item(), len(batch[0]))  # type: ignore[attr-defined]
            meters["all"][0].update(loss.item(), len(batch[0]))  # type: ignore[index]
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            defaults: Any = type(self).training_step.__defaults__
            states.append((batches, *counts.values(), *vars(meters["loss"]).values()))
            states.append((*vars(meters["all"][0]).values(), *defaults[0]))  # type: ignore[index]

        def on_train_end(self) -> None:
            if self.trainer.is_global_zero:
                lists.extend(map(list, (history, recent)))

    found = fit(pipeline, Keeps)
    return found, states, lists


@CASES
def test_what_a_step_keeps_around_its_class_is_that_of_one_device(
    ranks: Ranks, num_microbatches: int
) -> None:
    expected, states, lists = kept_around(None)
    for found, others, mine in ranks(2)(kept_around, {"stages": 2, "num_microbatches": num_microbatches}):
        assert_same(found, expected)
        for one, other in zip(others, states, strict=True):
            assert one == pytest.approx(other, rel=1e-9)
        for own, known in zip(mine, lists, strict=False):
            assert own == pytest.approx(known, rel=1e-9)


class Registers(Regression):
    """Hands its batches to another file, for which others ask there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept_elsewhere.record(batch[0])
        return super().training_step(batch, batch_idx)


def test_globals_and_classes_of_files_that_are_imported_from_are_the_steps() -> None:
    code = code_of(Registers())
    files = {file.__name__ for file in code.files}
    assert files > {Registers.__module__, Regression.__module__, kept_elsewhere.__name__}
    assert kept_elsewhere.Registry in code.classes
    assert kept_elsewhere.record not in code.functions
    assert not any(name.startswith(("torch", "lightning")) for name in files)


class KeepsElsewhere(Regression):
    """Counts and keeps in another file, in its sampler, its data and its loader, and goes by that."""

    records: list[float]

    def on_fit_start(self) -> None:
        kept_elsewhere.RECORDS.clear()
        kept_elsewhere.Registry.size = 0
        self.history = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        kept_elsewhere.record(loss.detach())
        kept_elsewhere.Registry.size += len(batch[0])
        loaded: Any = self.trainer.train_dataloader
        loaded.dataset.difficulty = getattr(loaded.dataset, "difficulty", 0) + 1
        loaded.sampler.total = getattr(loaded.sampler, "total", 0.0) + float(loss)
        loaded.samples = getattr(loaded, "samples", 0) + len(batch[0])
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        loaded: Any = self.trainer.train_dataloader
        self.history += [float(kept_elsewhere.Registry.size), float(loaded.dataset.difficulty)]
        self.history += [float(loaded.samples), loaded.sampler.total]
        if self.trainer.is_global_zero:  # the last stage fills it
            self.records = [float(one) for one in kept_elsewhere.RECORDS]
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + loaded.dataset.difficulty)


def kept_in_loaders(pipeline: dict[str, Any] | None) -> Any:
    module, run = KeepsElsewhere(), trainer(pipeline)
    run.fit(module, loader(), loader(seed=4))
    logs = {name: float(one) for name, one in run.callback_metrics.items()}
    return (weights(module), logs), module.history, getattr(module, "records", None)


@pytest.mark.parametrize("stages", [1, 2])
def test_what_a_step_keeps_in_other_files_and_in_loaders_is_one_devices(ranks: Ranks, stages: int) -> None:
    expected, history, records = kept_in_loaders(None)
    told = ranks(stages)(kept_in_loaders, {"stages": stages, "num_microbatches": 2})
    for found, seen, _ in told:
        assert_same(found, expected)
        assert seen == pytest.approx(history, rel=1e-9)
    assert len(records) == 6
    assert [own for *_, own in told if own is not None] == [pytest.approx(records, rel=1e-9)]
