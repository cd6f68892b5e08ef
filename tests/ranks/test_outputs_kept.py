"""Outputs that a step keeps in dictionaries and lists of lists, for a hook at the epoch's end to read."""

import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Keeps(Regression):
    """A container is read before the layers are called: `self.kept["outputs"].append(self.net(x))`."""

    def made(self) -> Any:
        return {"outputs": [], "targets": []}

    def on_validation_epoch_start(self) -> None:
        self.kept = self.made()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept["outputs"].append(self.net(batch[0]))
        self.kept["targets"].append(batch[1])

    def read(self) -> tuple[Any, Any]:
        return self.kept["outputs"], self.kept["targets"]

    def on_validation_epoch_end(self) -> None:
        outputs, targets = (torch.cat(values) for values in self.read())
        self.log("median", (outputs - targets).abs().median())


class ByDefault(Keeps):
    """Lists that a dictionary makes."""

    def made(self) -> Any:
        return defaultdict(list)


class SetByDefault(Keeps):
    """Lists that `setdefault` makes."""

    def made(self) -> Any:
        return {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.setdefault("outputs", []).append(self.net(batch[0]))
        self.kept.setdefault("targets", []).append(batch[1])


class Pairs(Keeps):
    """Lists in a list, of pairs."""

    def made(self) -> Any:
        return [[], []]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept[1].append((self.net(batch[0]), batch[1]))

    def read(self) -> tuple[Any, Any]:
        return tuple(zip(*self.kept[1], strict=True))  # type: ignore[return-value]


class Nested(Keeps):
    """A dictionary in a dictionary."""

    def made(self) -> Any:
        return {"val": super().made()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept["val"]["outputs"].append(self.net(batch[0]))
        self.kept["val"]["targets"].append(batch[1])

    def read(self) -> tuple[Any, Any]:
        return self.kept["val"]["outputs"], self.kept["val"]["targets"]


class OneList(Keeps):
    """A new list each time, with what was in the old one."""

    def made(self) -> Any:
        return []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept = self.kept + [(self.net(batch[0]), batch[1])]  # as users write it

    def read(self) -> tuple[Any, Any]:
        return tuple(zip(*self.kept, strict=True))  # type: ignore[return-value]


class Deep(Keeps):
    """By the part of the data, the kind of loss and its name, as torchmd-net keeps losses."""

    def made(self) -> Any:
        return {part: {kind: defaultdict(list) for kind in ("all", "few")} for part in ("train", "val")}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept["val"]["all"]["outputs"].append(self.net(batch[0]))
        self.kept["val"]["all"]["targets"].append(batch[1])

    def read(self) -> tuple[Any, Any]:
        return self.kept["val"]["all"]["outputs"], self.kept["val"]["all"]["targets"]


class DeepLists(Deep):
    """The same with lists that are there from the beginning."""

    def made(self) -> Any:
        return {part: {"all": {"outputs": [], "targets": []}} for part in ("train", "val")}


class ReadsWhatIsKept(Keeps):
    """Reads what another stage has, in its step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        before = len(self.kept["outputs"])
        self.kept["outputs"].append(self.net(batch[0] + before))
        self.kept["targets"].append(batch[1])


EQUAL = (Keeps, ByDefault, SetByDefault, Pairs, Nested, OneList, Deep, DeepLists)
KINDS = {kind.__name__: kind for kind in (*EQUAL, ReadsWhatIsKept)}


def medians(pipeline: dict[str, Any] | None, kind: str) -> tuple[float, list[str]]:
    """With a last batch that is shorter than the others, in two epochs."""
    run = trainer(pipeline)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(KINDS[kind](), loader(16), loader(10, 4, seed=4))
    ours = [str(one.message) for one in said if "validation_step" in str(one.message)]
    return float(run.callback_metrics["median"]), ours


@pytest.mark.parametrize("kind", [kind.__name__ for kind in EQUAL])
def test_what_a_step_keeps_is_one_devices(ranks: Ranks, kind: str) -> None:
    expected, _ = medians(None, kind)
    one_rank = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2}
    for found, said in (
        medians(one_rank, kind),
        *ranks(2)(medians, {"stages": 2, "num_microbatches": 2}, kind, group=False),
    ):
        assert found == pytest.approx(expected, rel=1e-12)
        assert said == []


class Remembers(Regression):
    """Keeps an array and a number for each batch, as a replay memory does."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: deque[Any] = deque(maxlen=9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            action = int(self.net(torch.ones(1, 6).double()).argmax(1).item())
        self.memory.append((numpy.full(2, float(batch_idx + action)), action))
        return super().training_step(batch, batch_idx)


def test_a_memory_of_arrays_has_one_entry_for_each_batch() -> None:
    one, ours = Remembers(), Remembers()
    trainer(None).fit(one, loader(24))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(training_step|what training_step)")
        trainer({"stages": 1, "num_microbatches": 2}).fit(ours, loader(24))
    assert len(one.memory) == len(ours.memory) == 6
    for (expected, action), (found, ours_action) in zip(one.memory, ours.memory, strict=True):
        assert action == ours_action
        numpy.testing.assert_array_equal(expected, found)


def test_a_length_is_known_on_all_stages(ranks: Ranks) -> None:
    expected, _ = medians(None, "ReadsWhatIsKept")
    found = ranks(2)(medians, {"stages": 2, "num_microbatches": 2}, "ReadsWhatIsKept", group=False)
    assert [median for median, _ in found] == pytest.approx([expected, expected], rel=1e-12)


class ReadAtOnce(Regression):
    """Hooks read after each batch what the step has put into lists of dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, Any] = {"all": [], "by": {"odd": [], "even": []}}
        self.made: dict[str, list[float]] = defaultdict(list)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses["all"].append(loss.item())
        self.losses["by"]["odd" if batch_idx % 2 else "even"].append(loss.item())
        self.losses["last"] = loss.item()
        self.made["all"].append(loss.item())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        by = self.losses["by"]["odd" if batch_idx % 2 else "even"]
        found = self.losses["all"][-1], sum(by), self.losses["last"], sum(self.made["all"])
        self.history.append(found)


def fit_reading_at_once(pipeline: dict[str, Any] | None) -> Any:
    module = ReadAtOnce()
    trainer(pipeline, max_epochs=2).fit(module, loader())
    return numpy.array(module.history)


@pytest.mark.parametrize("stages", [1, 2])
def test_lists_in_dictionaries_are_on_all_ranks_after_each_batch(ranks: Ranks, stages: int) -> None:
    expected = fit_reading_at_once(None)
    for found in ranks(stages)(fit_reading_at_once, {"stages": stages, "num_microbatches": 2}):
        numpy.testing.assert_allclose(found, expected, rtol=1e-10)


class Table(Regression):
    """A loss for each sample, written one by one into an array."""

    def __init__(self) -> None:
        super().__init__()
        self.table = numpy.ones(22)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, places = batch
        errors = (self.net(x) - y).abs().mean(1)
        for place, error in zip(places, errors, strict=True):
            self.table[place] = error.item()
        return errors.mean()


def fit_table(pipeline: dict[str, Any] | None) -> Any:
    module, data = Table(), loader().dataset
    assert isinstance(data, TensorDataset)
    trainer(pipeline).fit(module, DataLoader(TensorDataset(*data.tensors, torch.arange(22)), batch_size=8))
    return module.table


@pytest.mark.parametrize("stages", [1, 2])
def test_an_array_that_is_written_sample_by_sample_is_one_devices(ranks: Ranks, stages: int) -> None:
    expected = fit_table(None)
    for found in ranks(stages)(fit_table, {"stages": stages, "num_microbatches": 2}):
        numpy.testing.assert_allclose(found, expected, rtol=1e-10)


class Steered(Regression):
    """Its validation is not cut, for a value of the model decides; a hook is given what it returns."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.net[0](batch[0])
        found = self.net[1:](found * 2 if found.mean() > 0 else found)
        return {"error": (found - batch[1]).abs().mean(), "found": found}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(float(outputs["error"] + outputs["found"].sum()))


def fit_steered(pipeline: dict[str, Any] | None) -> list[float]:
    module = Steered()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "validation_step cannot be cut")
        trainer(pipeline, num_sanity_val_steps=0).fit(module, loader(), loader(seed=4))
    return module.history


def test_hooks_are_given_what_a_validation_that_is_not_cut_returns_on_all_ranks(ranks: Ranks) -> None:
    expected = fit_steered(None)
    for found in ranks(2)(fit_steered, {"stages": 2, "num_microbatches": 2}):
        assert found == pytest.approx(expected, rel=1e-10)
