"""Loaders that draw their order when they are iterated give the batches of one device, resumed ones too."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights
from tests.whole import chosen

Ranks = Callable[[int], Pool]

TWO = {"stages": 2, "num_microbatches": 2}


class ItsOwnIterator:
    """Draws its order when it is iterated, and begins anew then, as mlcolvar's loader does."""

    def __init__(self) -> None:
        self.batches = list(loader(24, batch_size=4))

    def __iter__(self) -> Any:
        self.order = torch.randperm(len(self.batches)).tolist()
        return self

    def __next__(self) -> Any:
        if not self.order:
            raise StopIteration
        return self.batches[self.order.pop()]


class BeginsAnew(ItsOwnIterator):
    """Draws nothing."""

    def __iter__(self) -> Any:
        self.order = list(range(len(self.batches)))
        return self


class DrawsLate(ItsOwnIterator):
    """When its first batch is asked for."""

    def __iter__(self) -> Any:
        for index in torch.randperm(len(self.batches)).tolist():
            yield self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


class OwnGenerator(DrawsLate):
    def __init__(self) -> None:
        super().__init__()
        self.drawn = torch.Generator().manual_seed(8)

    def __iter__(self) -> Any:
        for index in torch.randperm(len(self.batches), generator=self.drawn).tolist():
            yield self.batches[index]


class CountsEpochs(DrawsLate):
    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.draws = 0, numpy.random.default_rng(0)

    def __iter__(self) -> Any:
        self.epoch += 1
        self.draws = numpy.random.default_rng(self.epoch)
        for index in self.draws.permutation(len(self.batches)):
            yield self.batches[index]


class ShufflesItself(IterableDataset[Any]):
    def __init__(self) -> None:
        self.data = loader(24).dataset

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(24).tolist():
            yield self.data[index]


class Augments(IterableDataset[Any]):
    """Gives each item once, with noise."""

    def __init__(self) -> None:
        self.items = iter(loader(80).dataset)  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.items:
            yield x + torch.rand(()), y


def noisy() -> Iterator[Any]:
    for x, y in loader(48, batch_size=4):
        yield x + torch.rand(()), y


class DrawsAnItem:
    """Data with a generator of their own, for each item."""

    def __init__(self) -> None:
        self.data, self.draws = loader(24).dataset, numpy.random.default_rng(2)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + self.draws.random(), y

    def __len__(self) -> int:
        return 24


class Collates:
    """Counts what it collates."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, samples: Any) -> Any:
        self.count += 1
        return torch.utils.data.default_collate([(x + self.count, y) for x, y in samples])


MAKE: dict[str, Callable[[], Any]] = {
    "its own iterator": ItsOwnIterator,
    "begins anew": BeginsAnew,
    "draws late": DrawsLate,
    "own generator": OwnGenerator,
    "counts epochs": CountsEpochs,
    "dataset that shuffles": lambda: DataLoader(ShufflesItself(), batch_size=4),
    "loader with a generator": lambda: DataLoader(
        loader(24).dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "items with a generator": lambda: DataLoader(DrawsAnItem(), batch_size=4, shuffle=True),
    "collating that counts": lambda: DataLoader(loader(24).dataset, batch_size=4, collate_fn=Collates()),
    "stream with noise": lambda: DataLoader(Augments(), batch_size=4),
    "iterator with noise": noisy,
}
ONCE = ("stream with noise", "iterator with noise")


class Notes(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.history.append(float(batch[0].sum()))

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.history.append(-float(batch[0].sum()))


def fit(pipeline: dict[str, Any] | None, kind: str, resume: str | None = None, **options: Any) -> Any:
    pl.seed_everything(4 if resume is None else 5, verbose=False)
    module, data, held_out = Notes(), MAKE[kind](), MAKE[kind]()
    limit = {"limit_train_batches": 5} if kind in ONCE else {}
    given = {"val_check_interval": 3, "limit_val_batches": 2, **limit, **options}
    trainer(pipeline, **given).fit(module, data, held_out, ckpt_path=resume)
    return module.history, torch.rand(2), weights(module)


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        ("auto", chosen(list(MAKE), 0, 3, 6, 8, 10)),
        ("broadcast", ["its own iterator", "iterator with noise"]),
    ],
    ids=["auto", "broadcast"],
)
def test_batches_come_in_the_order_of_one_device(ranks: Ranks, data: str, kinds: Iterable[str]) -> None:
    for kind in kinds:
        expected = fit(None, kind)
        for found in ranks(2)(fit, {**TWO, "data": data}, kind):
            assert found[0] == expected[0], kind
            same = slice(1 if data == "auto" else 2, None)  # one rank draws where one loads
            torch.testing.assert_close(found[same], expected[same], rtol=1e-10, atol=1e-10)


def save_and_resume(kind: str, folder: str) -> list[Any]:
    savers = [
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1) for step in (4, 6)
    ]
    fit(TWO, kind, enable_checkpointing=True, callbacks=savers, max_steps=6, limit_val_batches=0)
    steps = (4,) if kind == "dataset that shuffles" else (4, 6)
    return [fit(TWO, kind, f"{folder}/step={step}.ckpt", limit_val_batches=0) for step in steps]


@pytest.mark.parametrize("kind", ["its own iterator", "own generator", "dataset that shuffles"])
def test_a_resumed_run_goes_on_in_the_order_of_one_device(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    history, *expected = fit(None, kind, limit_val_batches=0)
    for runs in ranks(2)(save_and_resume, kind, str(tmp_path)):
        for left, (found, *rest) in zip((8, 6), runs, strict=False):
            assert found == history[-left:]
            torch.testing.assert_close(rest, expected, rtol=1e-10, atol=1e-10)


class Streamed(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        data: Any = loader(8).dataset
        yield from (data[index] for index in range(8))


class NotesIndices(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step))


def resumed_after_the_last_batch(pipeline: dict[str, Any] | None, folder: str) -> Any:
    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=4)
    for epochs, resume in [(1, None), (3, f"{folder}/last.ckpt")]:
        module = NotesIndices()
        run = trainer(pipeline, max_epochs=epochs, callbacks=[saves], enable_checkpointing=True)
        run.fit(module, DataLoader(Streamed(), batch_size=2), loader(4), ckpt_path=resume)
    return module.seen, weights(module)


def test_a_run_saved_after_the_last_batch_of_a_stream_goes_on_with_the_next_epoch(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = resumed_after_the_last_batch(None, str(tmp_path / "one"))
    assert [step for _, _, step in expected[0]] == list(range(4, 12))
    for found in ranks(2)(resumed_after_the_last_batch, TWO, str(tmp_path / "two")):
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-10)
