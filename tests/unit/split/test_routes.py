"""The units that are called differ from micro-batch to micro-batch: by draws, the epoch, what is in the batch."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.rehearsal.routes import RouteFinder
from lightning_pipeline.model.state import outside
from tests.unit.split.nets import WIDTH, Block, seeded
from tests.unit.split.pipe import Module, alone, assert_same, piped


def seeded_by(index):
    generator = random.Random(index)
    return [generator.random() < 0.4 for _ in range(6)]


BY_INDEX = {
    "seeded by index": seeded_by,
    "numpy by index": lambda index: numpy.random.RandomState(index).random_sample(6) < 0.4,
    "listed by index": lambda index: [[n in one for n in range(6)] for one in ((), (1, 4), (2,), (0, 1))][
        index
    ],
    "generator by index": lambda index: torch.rand(6, generator=torch.Generator().manual_seed(index)) < 0.4,
}


class Ways(Module):
    """Six layers and three heads; which of them are called is chosen by `self.chosen(...)`."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.current_epoch = by, 0
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def left_out(self, batch, index, number):
        if self.by in BY_INDEX:
            return BY_INDEX[self.by](index)[number]
        match self.by:
            case "torch":
                return torch.rand([]) < 0.4
            case "numpy":
                return numpy.random.uniform() < 0.4
            case "random":
                return random.random() < 0.4
            case "epoch":
                return self.current_epoch < 1 and number >= 2
            case "flag":
                return number in self.layers[3].skipped
            case "index":
                return index % 2 and number < 2
            case "values":
                return bool(batch["x"][0, 0] > 0) and number in (0, 5)
            case "listed":
                return batch["x"][:, 0].tolist()[0] > 0 and number in (0, 5)
        return False

    def training_step(self, batch, batch_idx):
        h = F.dropout(self.emb(batch["x"]), 0.1, self.by in ("torch", "numpy", "random"))
        for number, layer in enumerate(self.layers):
            if not self.left_out(batch, batch_idx, number):
                h = layer(h)
            elif self.by == "values":
                h = layer(layer(h))
        head = {"a": 0, "b": 1}[batch["task"][0]] if self.by == "task" else 2
        loss = F.mse_loss(self.heads[head](h), batch["y"])
        self.log("loss", loss)
        return loss


def batches(module, count):
    module.current_epoch = count // 2
    module.layers[3].skipped = () if count < 2 else (1, 3)
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    batch = {"x": x, "y": x.sin()}
    return (
        {**batch, "task": ["a", "a", "b", "a"] if count % 2 else ["b"] * 4} if module.by == "task" else batch
    )


@pytest.mark.parametrize("by", ["epoch", "flag", "index", *BY_INDEX, "values", "listed", "task"])
def test_what_is_called_by_epoch_batch_or_attribute_is_that_of_one_device(by):
    made = seeded(lambda: Ways(by))
    batches(made, 0)
    options = {"steps": 4, "each": batches}
    mine = piped(made, batches(made, 0), 3, **options)
    assert_same(mine, alone(made, None, **options))
    ways = {
        route.number
        for split in mine.splits
        for route in split._finder._steps["training_step"].known.values()
    }
    assert len(ways) > 1


@pytest.mark.parametrize(
    ("by", "options"),
    [
        ("torch", {"stages": 3}),
        ("numpy", {"stages": 2, "split_backward": True}),
        ("random", {"stages": 4, "ranks": [[0, 2], [1, 3]]}),
    ],
)
def test_layers_left_out_at_random_are_those_of_one_stage(by, options):
    made = seeded(lambda: Ways(by))
    common = {"steps": 2, "each": batches, "num_microbatches": 4}
    mine, whole = (
        piped(made, batches(made, 0), **options, **common),
        piped(made, batches(made, 0), 1, **common),
    )
    assert_same(mine, whole)
    finder = mine.splits[0]._finder._steps["training_step"]
    assert len(finder.known) > 3
    assert len({tuple(split._finder._steps["training_step"].known) for split in mine.splits}) == 1


def test_an_index_that_decides_nothing_is_not_looked_at_for_ever():
    class Named(Ways):
        def training_step(self, batch, batch_idx):
            self.name = [f"batch {number}" for number in range(50)][batch_idx]
            return super().training_step(batch, 0)

    made = seeded(lambda: Named("nothing"))
    mine = piped(made, batches(made, 0), 2, steps=34, each=lambda module, count: batches(module, 0))
    (step,) = mine.splits[0]._finder._steps.values()
    assert step.index_tried and not step.follows_index


READ = {
    "positions": lambda batch, index: torch.arange(len(batch["x"])).diff().ne(1).cumsum(0),
    "positions from the index": lambda batch, index: torch.arange(index + 1)[-1:] % 2,
    "a number of the index": lambda batch, index: torch.full((2,), index) % 2,
    "a size of the index": lambda batch, index: torch.ones(2, index + 1, dtype=torch.int64).sum(1) % 2,
    "positions up to the index": lambda batch, index: torch.ones(9)[: index + 1].sum() % 2,
    "how many values are positive": lambda batch, index: (
        torch.arange(1 + len((batch["x"] > 0).nonzero()))[-1:] % 2
    ),
    "positions that are written": lambda batch, index: torch.arange(4).copy_(batch["x"][0, :4] > 0)[:1],
    "positions that are drawn": lambda batch, index: torch.arange(4).random_(2)[:1],
    "the batch": lambda batch, index: (batch["x"][:1] > 0).long(),
    "whether values are close": lambda batch, index: torch.arange(2)[
        int(torch.allclose(batch["x"][0, :1], batch["x"][0, :1].abs())) :
    ][:1],
    "a truth value as a list": lambda batch, index: torch.arange(2)[int((batch["x"][0, 0] > 0).tolist()) :][
        :1
    ],
}


class Reads(Ways):
    """The last two layers are left out where a number says so that is read between units."""

    def __init__(self, what: str) -> None:
        super().__init__("")
        self.what = what

    def left_out(self, batch, index, number):
        return number > 3 and bool((READ[self.what](batch, index) == 0).all())


def other_values(module, count):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    return {"x": x, "y": x.sin()}


@pytest.mark.parametrize("what", READ)
def test_numbers_of_sizes_alone_are_read_once_and_others_in_each_batch(what, monkeypatch):
    made, looks, glance = seeded(lambda: Reads(what)), [], RouteFinder._glance
    monkeypatch.setattr(RouteFinder, "_glance", lambda *args: looks.append(args[0]) or glance(*args))
    options = {"steps": 6, "num_microbatches": 2, "each": other_values}
    mine, whole = (piped(made, other_values(made, 0), stages, **options) for stages in (2, 1))
    assert_same(mine, whole)
    (split, *_), is_known = mine.splits, what == "positions"
    assert (looks.count(split._finder) <= 4) is is_known  # once when all is new, else in all of 6 batches
    assert (len(split._finder._steps["training_step"].known) == 1) is is_known


class Teacher(Ways):
    """On another way, a parameter outside all units is used early."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        if self.current_epoch:
            h = self.layers[0](h * self.scale)
        for layer in self.layers[1:]:
            h = layer(h)
        return F.mse_loss(self.heads[2](h) * self.scale, batch["y"])


def test_a_way_that_needs_a_parameter_where_it_is_not_is_refused_by_name():
    made = seeded(Teacher)
    with pytest.raises(SplitError, match=r"another way .*calls \['layers.0'\]: 'scale' is used on a stage"):
        piped(made, batches(made, 0), 2, steps=4, each=batches)


def test_a_way_that_flows_back_is_refused_by_name():
    class Back(Ways):
        def training_step(self, batch, batch_idx):
            layers = list(self.layers)
            for layer in reversed(layers) if self.current_epoch else layers:
                batch = {**batch, "x": layer(batch["x"])}
            return F.mse_loss(batch["x"], batch["y"])

    made = seeded(lambda: Back("epoch"))
    with pytest.raises(SplitError, match="another way .*flows into .*on an earlier stage"):
        piped(made, batches(made, 0), 2, steps=4, each=batches)


def test_a_step_that_chooses_nothing_is_not_looked_at_twice():
    made = seeded(lambda: Ways("nothing"))
    mine = piped(made, batches(made, 0), 2, steps=3)
    for split in mine.splits:
        assert not split._finder._steps["training_step"].varies


class Counting(Ways):
    """The number of samples with a mark chooses the head; `at` says when the step counts itself."""

    def __init__(self, at: str) -> None:
        super().__init__("nothing")
        self.at, self.rounds = at, 0

    def training_step(self, batch, batch_idx):
        if self.at == "first":
            self.rounds += 1
        marked = int((batch["x"][:, 0] > 0).sum())
        if self.at == "sometimes" and marked > 0 and bool(batch["x"].sum() < 1e9):
            self.rounds += 1
        if self.at == "sometimes":
            marked += int(batch["x"].sum() > 1e9)
        h = self.emb(batch["x"])
        for layer in self.layers:
            h = layer(h)
        loss = F.mse_loss(self.heads[marked % 2](h), batch["y"])
        if self.at == "last":
            self.rounds += 1
        return loss


@pytest.mark.parametrize("at", ["never", "first", "sometimes", "last"])
def test_a_way_by_numbers_that_were_read_before_is_found_without_putting_the_module_back(at, monkeypatch):
    made = seeded(lambda: Counting(at))
    kept: list[int] = []
    saved = outside.ModuleState
    monkeypatch.setattr(
        outside, "ModuleState", lambda root, **options: kept.append(1) or saved(root, **options)
    )

    def times_kept(steps):
        kept.clear()
        options = {"steps": steps, "each": lambda module, count: batches(module, count % 2)}
        assert_same(piped(made, batches(made, 0), 2, **options), alone(made, None, **options))
        return len(kept)

    assert (times_kept(8) > times_kept(4)) is (at in ("first", "sometimes"))
