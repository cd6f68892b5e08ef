"""What loaders keep in lists, generators, iterators and functions: the look at the first batch leaves it."""

import functools
import itertools
import queue
import random
import sqlite3
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

Ranks = Callable[[int], Pool]
GLOBAL = numpy.random.default_rng(0)
COUNTS = [0]


class Buckets(Sampler[list[int]]):
    """Shuffles its batches in place whenever it is iterated."""

    def __init__(self) -> None:
        self.batches = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11, 12, 13], [14, 15]]

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Permuted(Sampler[int]):
    """Shuffles an array in place."""

    def __init__(self) -> None:
        self.order = numpy.arange(16)

    def __iter__(self) -> Iterator[int]:
        numpy.random.shuffle(self.order)
        return iter(self.order.tolist())

    def __len__(self) -> int:
        return 16


class Noise:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.generator = numpy.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.generator.normal()


class Changed(Dataset[Any]):
    """Changes inputs by something that goes on from sample to sample."""

    def __init__(self, kind: str = "transform") -> None:
        self.samples, self.kind = loader(16).dataset, kind
        self.transforms, self.other = [Noise()], itertools.cycle(range(5))
        self.made, self.recent, self.seen = (
            (n / 7 for n in itertools.count()),
            deque(range(4)),
            numpy.zeros(16),
        )

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + self.change(x, index), y

    def change(self, x: Tensor, index: int) -> Any:
        if self.kind == "transform":
            return self.transforms[0](x)
        if self.kind == "cycle":
            return next(self.other)
        if self.kind == "generator":
            return next(self.made)
        if self.kind == "deque":
            self.recent.rotate(1)
            return self.recent[0]
        if self.kind == "counts":
            self.seen[index] += 1
            return self.seen[index]
        if self.kind == "global list":
            COUNTS[0] += 1
            return COUNTS[0] / 7
        return GLOBAL.normal()


class Awkward(Changed):
    """Holds what may not be written, or is more than its attributes."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(kind)
        self.expanded = torch.tensor(1.0).expand(16, 3)
        numpy.save(folder / "mapped.npy", numpy.arange(16.0))
        self.mapped = torch.from_numpy(numpy.load(folder / "mapped.npy", mmap_mode="r"))
        self.cursor = sqlite3.connect(":memory:").cursor()
        self.cursor.execute("create table numbers (number real)")
        self.cursor.executemany("insert into numbers values (?)", [(n / 7,) for n in range(16)])
        self.queue: queue.Queue[float] = queue.Queue()
        self.large, self.done = torch.ones(16, 6000, dtype=torch.float64), [False] * 16
        self.numbers = set(range(100, 1000, 57))

    def change(self, x: Tensor, index: int) -> Any:
        if self.kind == "cursor":
            rows = self.cursor.execute("select number from numbers where rowid = ?", (index + 1,))
            return next(iter(rows.fetchall()))[0]
        if self.kind == "queue":
            self.queue.put(index / 7)
            return self.queue.get(timeout=5)
        if self.kind == "preprocessed":
            if not self.done[index]:
                self.large[index] /= 2
                self.done[index] = True
            return self.large[index, 0]
        if self.kind == "set":
            return list(self.numbers)[index] / 1000
        return self.expanded[index, 0] + self.mapped[index]


def collated(items: list[Any], generator: Any) -> Any:
    x, y = default_collate(items)
    return x + generator.normal(), y


def loader_of(kind: str) -> Any:
    data = loader(16).dataset
    if kind == "buckets":
        return DataLoader(data, batch_sampler=Buckets())
    if kind == "permuted":
        return DataLoader(data, batch_size=4, sampler=Permuted())
    if kind == "partial":
        collate = functools.partial(collated, generator=numpy.random.default_rng(0))
        return DataLoader(data, batch_size=4, collate_fn=collate)
    if kind == "closure":
        generator = numpy.random.default_rng(0)
        return DataLoader(data, batch_size=4, collate_fn=lambda items: collated(items, generator))
    if kind == "joined":
        return DataLoader(ConcatDataset([Changed(), Changed()]), batch_size=8, shuffle=True)
    return DataLoader(Changed(kind), batch_size=4, shuffle=True)


KINDS = [
    "buckets", "permuted", "partial", "closure", "joined", "transform", "cycle", "generator", "deque", "counts",
    "global list", "global",
]  # fmt: skip


def fitted(pipeline: dict[str, Any] | None, kind: str, validates: bool) -> tuple[Any, ...]:
    GLOBAL.bit_generator.state = numpy.random.default_rng(0).bit_generator.state
    COUNTS[0] = 0
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    module, run = Regression(), trainer(pipeline)
    run.fit(module, loader(8) if validates else loader_of(kind), loader_of(kind) if validates else loader(8))
    return weights(module), float(run.callback_metrics["val_loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_look_at_a_first_batch_changes_nothing_that_loaders_keep(kind: str) -> None:
    pipeline = {"stages": 1, "num_microbatches": 2}
    for validates in (False, True):
        torch.testing.assert_close(
            fitted(pipeline, kind, validates), fitted(None, kind, validates), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("kind", ["buckets", "closure", "generator"])
def test_it_changes_nothing_on_several_ranks(ranks: Ranks, kind: str) -> None:
    expected = fitted(None, kind, False)
    for found in ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, kind, False, group=False):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["memory", "cursor", "queue", "preprocessed", "set"])
def test_what_may_not_be_written_stands(tmp_path: Path, kind: str) -> None:
    found = []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        module, run = Regression(), trainer(pipeline)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of memory that is read only
            run.fit(module, DataLoader(Awkward(kind, tmp_path), batch_size=4))
        found.append(weights(module))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


class Stream(IterableDataset[Any]):
    """Its workers share its items, and draw noise."""

    def __iter__(self) -> Any:
        items, worker = list(loader(8).dataset), get_worker_info()
        mine = items if worker is None else items[worker.id :: worker.num_workers]
        return ((x + torch.rand((), dtype=x.dtype), y) for x, y in mine)


class Streams(Regression):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=4, num_workers=2)


def streamed(pipeline: dict[str, Any] | None) -> dict[str, Any]:
    module = Streams()
    seed_everything(11, workers=True, verbose=False)
    trainer(pipeline, max_epochs=2).fit(module)
    return weights(module)


def test_workers_of_a_stream_draw_what_they_draw_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # so that it is taken back
    expected = streamed(None)
    torch.testing.assert_close(streamed({"stages": 1, "num_microbatches": 2}), expected, rtol=1e-9, atol=1e-9)


class Scaled(IterableDataset[Any]):
    """Goes by what hooks set, and counts how often it is iterated."""

    scale, epoch, iterated = 1.0, 0, 0

    def __len__(self) -> int:
        return 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.iterated += 1
        items, made = list(loader(12).dataset), torch.Generator().manual_seed(self.epoch + 10 * self.iterated)
        for place in torch.randperm(12, generator=made).tolist():
            yield self.scale * items[place][0], items[place][1]


class Once(Scaled):
    """Goes on from where it was."""

    def __init__(self) -> None:
        self.left = iter(list(loader(12).dataset))

    def __iter__(self) -> Any:
        return ((self.scale * x, y) for x, y in self.left)


class Queued(Scaled):
    """As another thread or process may fill it."""

    def __init__(self) -> None:
        self.left: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for item in loader(12).dataset:
            self.left.put(item)

    def __iter__(self) -> Any:
        while not self.left.empty():
            x, y = self.left.get()
            yield self.scale * x, y


class Sets(Regression):
    def __init__(self, data: Any, workers: int) -> None:
        super().__init__()
        self.data, self.workers, self.seen = data, workers, list[Tensor]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[1])

    def on_fit_start(self) -> None:
        self.data.scale = 0.5

    def on_train_epoch_start(self) -> None:
        self.data.set_epoch(self.current_epoch + 1)

    def train_dataloader(self) -> Any:
        keeps = bool(self.workers)
        return DataLoader(self.data, batch_size=4, num_workers=self.workers, persistent_workers=keeps)


def test_a_stream_of_an_iterator_is_as_hooks_have_set_it() -> None:
    found = []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        module = Sets(Once(), 0)
        trainer(pipeline, max_epochs=1).fit(module)
        found.append((torch.cat(module.seen), weights(module)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("workers", [1, 0])
def test_a_stream_is_as_hooks_have_set_it(workers: int) -> None:
    found = []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        module = Sets(Scaled(), workers)
        trainer(pipeline, max_epochs=2).fit(module)
        found.append((module.data.iterated, module.data.epoch, weights(module)))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[1][2], found[0][2], rtol=1e-9, atol=1e-9)


def test_a_stream_that_is_read_once_says_that_its_first_batch_is_as_it_was() -> None:
    module = Sets(Queued(), 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer({"stages": 1, "num_microbatches": 2}, max_epochs=1).fit(module)
    assert any("does not begin anew when it is iterated again" in str(one.message) for one in said)
    seen = torch.cat(module.seen)
    torch.testing.assert_close(seen, torch.stack([y for _, y in loader(12).dataset]))


class Drawn(IterableDataset[Any]):
    """In an order of its own: none, one that is drawn with the first item, or at once with an iterator."""

    def __init__(self, order: str) -> None:
        self.order, self.items = order, list(loader(8, seed=5).dataset)

    def __iter__(self) -> Any:
        if self.order == "at once":
            return iter([self.items[place] for place in torch.randperm(8).tolist()])
        return self._later()

    def _later(self) -> Any:
        for place in torch.randperm(8).tolist() if self.order == "drawn" else range(8):
            yield self.items[place]


def beside(*kinds: str) -> list[Any]:
    """Loaders side by side."""
    made: dict[str, Any] = {
        "plain": lambda: loader(8, batch_size=4),
        "shuffled": lambda: loader(8, batch_size=4, shuffle=True),
        "stream": lambda: DataLoader(Drawn("none"), batch_size=4),
        "workers": lambda: DataLoader(Drawn("drawn"), batch_size=4, num_workers=1),
        "drawn": lambda: DataLoader(Drawn("drawn"), batch_size=4),
        "at once": lambda: DataLoader(Drawn("at once"), batch_size=4),
    }
    return [made[kind]() for kind in kinds]


class Beside(Regression):
    """Notes what its batches have, and what hooks draw; `draws` names the hook that draws before all else."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.draws, self.noted = draws, list[float]()

    def on_fit_start(self) -> None:
        if self.draws == "Python's":
            random.random()
        elif self.draws == "torch's":
            torch.rand(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = sum(self.loss(part) for part in batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", sum(self.loss(part) for part in batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.noted += [float(torch.rand(())), *(float(x.sum()) for x, _ in batch)]

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.on_train_batch_start(batch, batch_idx)


SIDES = [
    "shuffled plain", "plain shuffled", "stream shuffled", "shuffled stream", "drawn drawn", "drawn stream",
    "shuffled drawn", "drawn shuffled", "at once shuffled", "shuffled at once", "workers drawn", "stream workers",
]  # fmt: skip


@pytest.mark.parametrize("draws", ["", "Python's", "torch's"])
@pytest.mark.parametrize("kinds", SIDES)
def test_streams_draw_when_those_of_one_device_draw(kinds: str, draws: str) -> None:
    names, found = kinds.replace("at once", "at_once").split(), []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        module = Beside(draws)
        torch.manual_seed(3)
        random.seed(1)
        data = [beside(*(name.replace("_", " ") for name in names)) for _ in range(2)]
        evaluated = CombinedLoader(data[1], "min_size")
        trainer(pipeline, max_epochs=2, num_sanity_val_steps=2).fit(module, data[0], evaluated)
        found.append(module.noted)
    assert found[1] == pytest.approx(found[0], abs=1e-9)


class Crossing(Regression):
    """Of two loaders now one has more samples, now the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = sum(self.loss(part) for part in batch.values())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name, (x, y) in batch.items():
            out = self.net(x)
            self.error.update(out, y)
            self.log(name, (out - y).square().mean(), batch_size=len(x))
        self.log("error", self.error)


CROSSING: list[CombinedLoader] = []  # as a script has its loaders, which the step can reach


@pytest.mark.filterwarnings("ignore:The batch was cut")
def test_loaders_of_several_sizes_count_each_sample_once() -> None:
    found = []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        module, run = Crossing(), trainer(pipeline, max_epochs=2)
        sizes = {"a": (6, 4), "b": (9, 3)}
        CROSSING[:] = [
            CombinedLoader({name: loader(*size, seed=5) for name, size in sizes.items()}, "max_size_cycle")
            for _ in range(2)
        ]
        run.fit(module, *CROSSING)
        found.append((weights(module), {name: float(value) for name, value in run.callback_metrics.items()}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-9, atol=1e-9)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-9)


class Keeps(Regression):
    """Its loader is an attribute, of which the step asks how long it is; the loss is of a mask's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.both = CombinedLoader([loader(16, batch_size=4) for _ in range(2)], "max_size_cycle")
        self.kinds = set[str]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kinds.add(type(self.both).__name__)

    def train_dataloader(self) -> Any:
        return self.both

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0]
        mask = (x[:, 0] > 0).to(x.dtype)
        return ((self.net(x) - y).square().mean(1) * mask).sum() / mask.sum().clamp(min=1) / len(self.both)


def test_a_loader_that_a_module_keeps_is_none_that_its_step_takes_from(
    recwarn: pytest.WarningsRecorder,
) -> None:
    found = []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        module = Keeps()
        trainer(pipeline, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(module)
        assert module.kinds == {"CombinedLoader"}
        found.append(weights(module))
    assert not [str(one.message) for one in recwarn if "takes from" in str(one.message)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


class Drops(Regression):
    """Lets go of iterators in the step, of which it has taken nothing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.iterators, self.left = how, [iter(range(9)) for _ in range(3)], list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "pop" and self.iterators:
            self.iterators.pop()
        elif self.how == "clear":
            self.iterators.clear()
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.left.append([type(one).__name__ for one in self.iterators])


@pytest.mark.parametrize("how", ["none", "clear", "pop"])
def test_iterators_that_a_step_lets_go_of_are_gone(how: str) -> None:
    found = []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        module = Drops(how)
        trainer(pipeline).fit(module, loader(16))
        found.append(module.left)
    assert found[1] == found[0]
