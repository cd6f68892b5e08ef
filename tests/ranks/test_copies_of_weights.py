"""Copies of weights that hooks keep beside the module: whole after a run, and those of one device in the next."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]

ANCHORS: dict[str, Any] = {}


class Store:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}


@dataclass(slots=True)
class Slotted:
    """Likewise, in slots and a deque."""

    kept: deque[Tensor] = field(default_factory=deque)


class Data(pl.LightningDataModule):
    """What a project of several tasks has."""

    old: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.store, self.slotted = Store(), Slotted()

    def train_dataloader(self) -> Any:
        return loader()


class Anchored(Regression):
    """After a fit it keeps its weights; the next one stays near to them."""

    def kept(self) -> list[Tensor]:
        """What was kept, if any."""
        raise NotImplementedError

    def keep(self, weights: dict[str, Tensor]) -> None:
        """Keep that."""
        raise NotImplementedError

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for old, parameter in zip(self.kept(), self.parameters(), strict=False):
            loss = loss + 0.5 * (parameter - old).square().sum()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_end(self) -> None:
        self.keep({name: one.detach().clone() for name, one in self.named_parameters()})


class InData(Anchored):
    def kept(self) -> list[Tensor]:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        return list(data.old or ())

    def keep(self, weights: dict[str, Tensor]) -> None:
        self.trainer.datamodule.old = tuple(weights.values())  # type: ignore[attr-defined]


class InAnObject(Anchored):
    def kept(self) -> list[Tensor]:
        return list(self.trainer.datamodule.store.kept.values())  # type: ignore[attr-defined]

    def keep(self, weights: dict[str, Tensor]) -> None:
        self.trainer.datamodule.store.kept.update(weights)  # type: ignore[attr-defined]


class InSlots(Anchored):
    def kept(self) -> list[Tensor]:
        return list(self.trainer.datamodule.slotted.kept)  # type: ignore[attr-defined]

    def keep(self, weights: dict[str, Tensor]) -> None:
        self.trainer.datamodule.slotted.kept = deque(weights.values())  # type: ignore[attr-defined]


class InAGlobal(Anchored):
    def kept(self) -> list[Tensor]:
        return ANCHORS.get("old", [])

    def keep(self, weights: dict[str, Tensor]) -> None:
        ANCHORS["old"] = list(weights.values())


class InTheClass(Anchored):
    old: ClassVar[list[Tensor]] = []

    def kept(self) -> list[Tensor]:
        return self.old

    def keep(self, weights: dict[str, Tensor]) -> None:
        type(self).old = list(weights.values())


def fit_twice(kind: type[Anchored], pipeline: dict[str, Any] | None) -> Any:
    ANCHORS.clear()
    InTheClass.old = []
    module, data = kind(), Data()
    for _ in range(2):
        run = trainer(pipeline, max_epochs=1)
        run.fit(module, datamodule=data)
    module.trainer = run  # which the end of a fit takes away where nothing else follows
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), [one.clone() for one in module.kept()]


@pytest.mark.parametrize("kind", [InData, InAnObject, InSlots, InAGlobal, InTheClass])
def test_the_next_fit_stays_near_to_what_the_one_before_kept(ranks: Ranks, kind: type[Anchored]) -> None:
    expected, kept = fit_twice(kind, None)
    assert len(kept) > 3
    pipeline = {"stages": 2, "num_microbatches": 2}
    for found, theirs in ranks(2)(fit_twice, kind, pipeline, group=False):
        assert_same(found, expected)
        torch.testing.assert_close(theirs, kept, rtol=1e-9, atol=1e-9)
