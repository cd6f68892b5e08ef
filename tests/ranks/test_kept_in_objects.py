"""What a step writes in objects of all kinds: slots, classes of the standard library, many and deep ones."""

import queue
from collections import UserDict, UserList
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


@dataclass(slots=True)
class Slotted:
    """A meter."""

    total: float = 0.0
    count: int = 0
    losses: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """One more."""
        self.total += value
        self.count += 1
        self.losses.append(value)


class Private:
    """One with a slot of its own name."""

    __slots__ = ("__count", "total")

    def __init__(self) -> None:
        self.total, self.__count = 0.0, 0

    def add(self, value: float) -> None:
        """One more."""
        self.total += value
        self.__count += 1

    @property
    def count(self) -> int:
        """How many."""
        return self.__count


class Both(Private):
    """A class with attributes that inherits slots."""

    def __init__(self) -> None:
        super().__init__()
        self.best = float("inf")

    def add(self, value: float) -> None:
        super().add(value)
        self.best = min(self.best, value)


class Counting(list[float]):
    """A list with an attribute."""

    best = float("inf")

    def append(self, value: float) -> None:
        super().append(value)
        self.best = min(self.best, value)


def put(to: list[float], value: float) -> None:
    to.append(value)


class Keeping(Regression):
    """After each batch it takes the rate from what was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.made()
        self.found: list[Any] = []

    def made(self) -> Any:
        """What keeps."""
        raise NotImplementedError

    def keep(self, value: float) -> None:
        """Keep one."""
        self.kept.add(value)

    def told(self) -> list[float]:
        """What was kept."""
        return [self.kept.total, self.kept.count]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.keep(loss.item())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append([round(float(one), 7) for one in self.told()])
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 / (1 + abs(sum(self.told())))


class InSlots(Keeping):
    def made(self) -> Any:
        return Slotted()

    def told(self) -> list[float]:
        return [*super().told(), *self.kept.losses]


class InPrivateSlots(Keeping):
    def made(self) -> Any:
        return Private()


class InBoth(Keeping):
    def made(self) -> Any:
        return Both()

    def told(self) -> list[float]:
        return [*super().told(), self.kept.best]


class InUserDict(Keeping):
    def made(self) -> Any:
        return UserDict[str, float](total=0.0, count=0)

    def keep(self, value: float) -> None:
        self.kept["total"] += value
        self.kept["count"] += 1

    def told(self) -> list[float]:
        return list(self.kept.values())


class InUserList(Keeping):
    def made(self) -> Any:
        return UserList[float]()

    def keep(self, value: float) -> None:
        self.kept.append(value)

    def told(self) -> list[float]:
        return list(self.kept)


class InAQueue(Keeping):
    def made(self) -> Any:
        return queue.Queue[float]()

    def keep(self, value: float) -> None:
        self.kept.put(value)

    def told(self) -> list[float]:
        return list(self.kept.queue)


class ByAPartial(Keeping):
    def made(self) -> Any:
        return partial(put, [])

    def keep(self, value: float) -> None:
        self.kept(value)

    def told(self) -> list[float]:
        return list(self.kept.args[0])


class InManyObjects(Keeping):
    def made(self) -> Any:
        return [Slotted() for _ in range(150)]

    def keep(self, value: float) -> None:
        self.kept[5].add(value)

    def told(self) -> list[float]:
        return [self.kept[5].total, self.kept[5].count, self.kept[6].count]


class Deep(Keeping):
    def made(self) -> Any:
        return {"a": {"b": {"c": {"d": {"losses": [], "meter": Slotted()}}}}}

    def keep(self, value: float) -> None:
        inner = self.kept["a"]["b"]["c"]["d"]
        inner["losses"].append(value)
        inner["meter"].add(value)

    def told(self) -> list[float]:
        inner = self.kept["a"]["b"]["c"]["d"]
        return [*inner["losses"], inner["meter"].count]


class InAListWithAttributes(Keeping):
    def made(self) -> Any:
        return Counting()

    def keep(self, value: float) -> None:
        self.kept.append(value)

    def told(self) -> list[float]:
        return [*self.kept, self.kept.best]


def fit(kind: type[Keeping], pipeline: dict[str, Any] | None) -> Any:
    module, run = kind(), trainer(pipeline)
    run.fit(module, loader(), loader(seed=4))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), module.found


CASES = [
    InSlots,
    InPrivateSlots,
    InBoth,
    InUserDict,
    InUserList,
    InAQueue,
    ByAPartial,
    InManyObjects,
    Deep,
]


def compare(ranks: Ranks, kind: type[Keeping], stages: int) -> None:
    expected, found = fit(kind, None)
    for result, theirs in ranks(stages)(fit, kind, {"stages": stages, "num_microbatches": 2}, group=False):
        assert_same(result, expected)
        assert len(theirs) == len(found)
        for one, other in zip(theirs, found, strict=True):
            assert one == pytest.approx(other, abs=2e-7)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", CASES)
def test_what_objects_keep_is_one_devices(ranks: Ranks, kind: type[Keeping], stages: int) -> None:
    compare(ranks, kind, stages)


def test_a_list_with_attributes_keeps_both_in_one_process(ranks: Ranks) -> None:
    compare(ranks, InAListWithAttributes, 1)
