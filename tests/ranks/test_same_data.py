"""Data, their order, the calls of the hooks that make them and the random state are those of one device."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    random_split,
)

from lightning_pipeline.errors import BatchMismatchError
from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]

TWO = {"stages": 2, "num_microbatches": 2}


def logged(run: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in run.callback_metrics.items()}


class DrawsData(Regression):
    """Its loader hooks draw: a split without a generator, a data set of their own, and the order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        data = loader(24).dataset
        self.train_part, _ = random_split(data, [16, 8])
        return DataLoader(self.train_part, batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        self.calls.append(f"val_dataloader, check: {self.trainer.sanity_checking}")
        return DataLoader(
            TensorDataset(
                torch.randn(8, FEATURES, dtype=torch.float64), torch.randn(8, TARGETS, dtype=torch.float64)
            ),
            batch_size=4,
        )

    test_dataloader = predict_dataloader = val_dataloader

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        return batch


def drawn(pipeline: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    module = DrawsData()
    pl.seed_everything(5, verbose=False)
    run = trainer(pipeline, **options)
    run.fit(module)
    found, logs = weights(module), logged(run)
    logs["drawn_after"] = float(torch.rand(()))
    for name, function in (("validate", run.validate), ("test", run.test)):
        for result in function(module, verbose=False):
            logs |= {f"{name}/{key}": value for key, value in result.items()}
    run.predict(module)
    return (found, logs), module.calls


@pytest.mark.parametrize(
    "options",
    [{}, {"num_sanity_val_steps": 0}, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
     {"overfit_batches": 1}, {"limit_val_batches": 0}],
    ids=str,
)  # fmt: skip
def test_data_that_hooks_draw_are_those_of_one_device(ranks: Ranks, options: dict[str, Any]) -> None:
    expected, calls = drawn(None, options)
    for found, made in ranks(2)(drawn, TWO, options):
        assert_same(found, expected)
        assert Counter(made) == Counter(
            calls
        )  # training's loader is asked for before the sanity check's batches
        loads = [[call for call in some if "loader" in call] for some in (made, calls)]
        assert loads[0] == loads[1]


class Overfits(Regression):
    """Looks at how its loader goes through the data."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(self.trainer.train_dataloader.sampler, SequentialSampler)
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(self.trainer.test_dataloaders.sampler, RandomSampler)  # which fit alone changes


def overfitted(pipeline: dict[str, Any] | None) -> Any:
    module = Overfits()
    run = trainer(pipeline, overfit_batches=1, max_epochs=1)
    run.fit(module, loader(shuffle=True))
    run.test(module, loader(shuffle=True), verbose=False)
    return weights(module), {}


def one_after_the_other(pipeline: dict[str, Any] | None, val: bool) -> str:
    both = CombinedLoader([loader(), loader(seed=4)], "sequential")
    try:
        trainer(pipeline).fit(Regression(), both, loader(seed=4) if val else None)
    except ValueError as error:
        return str(error)
    return "it trained"


def test_loaders_are_in_a_step_what_overfitting_makes_of_them(ranks: Ranks) -> None:
    expected = overfitted(None)
    for found in ranks(2)(overfitted, TWO):
        assert_same(found, expected)


@pytest.mark.parametrize("val", [True, False])
def test_loaders_one_after_the_other_are_refused_in_lightnings_words(ranks: Ranks, val: bool) -> None:
    told = one_after_the_other(None, val)
    assert "does not support" in told
    for found in ranks(2)(one_after_the_other, TWO, val):
        assert found.startswith(told)


class Stream(IterableDataset[Any]):
    """Its items come once, whoever asks."""

    def __init__(self, taken: list[int]) -> None:
        self.taken, self.next = taken, 0

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator()
        while True:
            self.next += 1
            self.taken.append(self.next)
            generator.manual_seed(self.next)
            x = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
            yield x, x[:TARGETS]


class Streamed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.first: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first.append(float(batch[0][0, 0]))


def resumed_stream(pipeline: dict[str, Any] | None, folder: str) -> Any:
    options: dict[str, Any] = {
        "limit_train_batches": 3, "limit_val_batches": 0, "default_root_dir": folder, "writes": True,
    }  # fmt: skip
    run = trainer(pipeline, max_epochs=1, **options)
    run.fit(Streamed(), DataLoader(Stream([]), batch_size=4))
    module, second = Streamed(), trainer(pipeline, max_epochs=3, **options)
    path = run.strategy.broadcast(run.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    second.fit(module, DataLoader(Stream([]), batch_size=4), ckpt_path=path)
    return (weights(module), logged(second)), module.first


def test_a_resumed_run_takes_nothing_from_a_stream(ranks: Ranks, tmp_path: Path) -> None:
    expected, batches = resumed_stream(None, str(tmp_path / "one"))
    for found, seen in ranks(2)(resumed_stream, TWO, str(tmp_path / "two")):
        assert seen == batches
        assert_same(found, expected)


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def fit_nothing(pipeline: dict[str, Any] | None) -> tuple[int, int]:
    module, run = Regression(), trainer(pipeline)
    run.fit(module, DataLoader(Nothing(), batch_size=2))
    second = trainer(pipeline)
    second.fit(module, DataLoader(Nothing(), batch_size=2), loader(seed=4))
    return run.global_step, second.global_step


def test_an_empty_loader_runs_no_step(ranks: Ranks) -> None:
    assert ranks(2)(fit_nothing, TWO) == [fit_nothing(None)] * 2


class Batches:
    """A loader that is no DataLoader."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class AnyBatch(Regression):
    """Makes its samples itself; the batch is a number, a word, or nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = {"many": 3, None: 7}.get(batch, batch)
        x = torch.linspace(0, 1 + float(number), 4 * FEATURES, dtype=torch.float64).reshape(4, FEATURES)
        loss = nn.functional.mse_loss(self.net(x), x[:, :TARGETS])
        self.log("train_loss", loss, batch_size=4, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=1)


def fit_any(pipeline: dict[str, Any] | None) -> Any:
    module, run = AnyBatch(), trainer(pipeline)
    run.fit(module, Batches([None, 2, "many", 5]), range(3))
    return weights(module), logged(run)


@pytest.mark.parametrize("number", [2, "auto"])
def test_batches_of_any_type_train(ranks: Ranks, number: Any) -> None:
    expected = fit_any(None)
    for found in ranks(2)(fit_any, {"stages": 2, "num_microbatches": number}):
        assert_same(found, expected)


class SomeNothing(Regression):
    """Of every second batch nothing is left, of the first one too, as where no sample can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.collated = 0
        self.seen: list[Any] = []

    def collate(self, samples: Any) -> Any:
        self.collated += 1
        return default_collate(samples) if self.collated % 2 == 0 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, batch is None, bool(outputs)))


def fit_some(pipeline: dict[str, Any] | None, streamed: bool) -> Any:
    module, run = SomeNothing(), trainer(pipeline)
    data = loader(16).dataset
    loads = DataLoader(data, 4, collate_fn=module.collate)
    run.fit(module, Batches([None, None, *loader(12)]) if streamed else loads)
    return weights(module), logged(run), module.seen, module.collated


@pytest.mark.parametrize("streamed", [True, False])
def test_batches_of_nothing_are_passed_over(ranks: Ranks, streamed: bool) -> None:
    expected = fit_some(None, streamed)
    assert expected[2][:2] == [(0, True, False), (1, streamed, not streamed)]
    for found in ranks(2)(fit_some, TWO, streamed):
        assert found[2:] == expected[2:]
        assert_same(found[:2], expected[:2])


class NoLoss(Regression):
    def __init__(self, mistyped: bool) -> None:
        super().__init__()
        self.mistyped = mistyped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"mistyped": self.loss(batch)} if self.mistyped else 5.0


def fit_without_loss(pipeline: dict[str, Any] | None, mistyped: bool) -> str:
    with pytest.raises(MisconfigurationException) as told:
        trainer(pipeline).fit(NoLoss(mistyped), loader())
    return str(told.value)


@pytest.mark.parametrize("mistyped", [True, False])
def test_a_step_without_a_loss_is_refused_in_the_words_of_one_device(ranks: Ranks, mistyped: bool) -> None:
    expected = fit_without_loss(None, mistyped)
    for found in ranks(2)(fit_without_loss, {"stages": 2}, mistyped):
        assert found.startswith(expected)


class Epochs(RandomSampler):
    def __init__(self, data: Any, told: list[int]) -> None:
        super().__init__(data)
        self.told = told

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class OwnLoader(DataLoader[Any]):
    pass


class LooksAtLoaders(Regression):
    def on_train_start(self) -> None:
        assert isinstance(self.trainer.train_dataloader, OwnLoader)


def told_epochs(pipeline: dict[str, Any] | None) -> Any:
    module, run, told = LooksAtLoaders(), trainer(pipeline), []
    pl.seed_everything(3, verbose=False)
    data = loader(16).dataset
    run.fit(
        module,
        OwnLoader(data, sampler=Epochs(data, told), batch_size=4),
        DataLoader(data, sampler=Epochs(data, told), batch_size=4),
    )
    run.validate(module, DataLoader(data, sampler=Epochs(data, told), batch_size=4), verbose=False)
    stream: list[int] = []
    run.fit_loop.epoch_progress.reset()
    second = trainer(pipeline, limit_train_batches=2, max_epochs=1)
    second.fit(module, OwnLoader(Stream(stream), batch_size=2))
    return (weights(module), logged(run)), told


def test_samplers_are_told_their_epoch_once_and_loaders_keep_their_class(ranks: Ranks) -> None:
    expected, told = told_epochs(None)
    for found, heard in ranks(2)(told_epochs, TWO):
        assert heard == told
        assert_same(found, expected)


def unseeded(pipeline: dict[str, Any] | None, folder: str, iterable: bool) -> Any:
    torch.seed()  # as a script that never seeds: every rank draws other data
    x = torch.randn(16, FEATURES, dtype=torch.float64)
    data: Any = Batches(list(zip(x.split(4), x[:, :TARGETS].contiguous().split(4), strict=True)))
    if not iterable:
        data = DataLoader(TensorDataset(x, x[:, :TARGETS]), batch_size=4, shuffle=True)
    module, run = Regression(), trainer(pipeline, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, data, data)
    again = loader(seed=9)
    (alone,) = trainer(None).validate(module, again, verbose=False)
    (spread,) = run.validate(module, again, verbose=False)
    text = [str(one.message) for one in caught if "load different data" in str(one.message)]
    return weights(module), logged(run), text, alone["val_loss"] - spread["val_loss"]


@pytest.mark.parametrize("iterable", [False, True])
def test_data_without_a_seed_come_from_one_rank_with_a_warning(
    ranks: Ranks, tmp_path: Path, iterable: bool
) -> None:
    first, second = ranks(2)(unseeded, TWO, str(tmp_path), iterable)
    assert_same(first[:2], second[:2])
    assert len(first[2]) == 1
    assert not second[2]
    assert abs(first[3]) < 1e-10


class Shares(IterableDataset[Any]):
    """Of a project that divides its samples among processes, or among replicas."""

    def __init__(self, by_replica: Callable[[], tuple[int, int]] | None) -> None:
        self.by_replica = by_replica

    def __iter__(self) -> Iterator[Any]:
        rank, size = 0, 1
        if self.by_replica is not None:
            rank, size = self.by_replica()
        elif torch.distributed.is_initialized():
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        yield from list(loader(32).dataset)[rank::size]


def divided(pipeline: dict[str, Any] | None, by_replica: bool) -> Any:
    module, run = Regression(), trainer(pipeline, max_epochs=1, limit_val_batches=0)
    strategy: Any = run.strategy
    own = (lambda: (strategy.replica_index, strategy.num_replicas)) if by_replica else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, DataLoader(Shares(own if pipeline else None), batch_size=8))
    return weights(module), [str(one.message) for one in caught if "load different data" in str(one.message)]


def test_data_that_are_divided_among_processes_are_to_be_divided_among_replicas(ranks: Ranks) -> None:
    (_, said), _ = ranks(2)(divided, TWO, False)
    assert "trainer.strategy.replica_index" in said[0]
    expected, _ = divided(None, False)
    for found, nothing in ranks(2)(divided, TWO, True):
        assert not nothing
        assert_same((found, {}), (expected, {}))


def differs_later(pipeline: dict[str, Any]) -> None:
    module, run = Regression(), trainer(pipeline)
    batches = list(loader(24))
    batches[1] = tuple(part + run.strategy.cluster_environment.global_rank() for part in batches[1])
    run.fit(module, Batches(batches))


def test_batches_that_differ_later_are_refused(ranks: Ranks) -> None:
    for outcome in ranks(2).outcomes(differs_later, TWO):
        assert isinstance(outcome.error, BatchMismatchError) or "BatchMismatchError" in str(outcome.error)
