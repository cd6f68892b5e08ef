"""Hooks that make loaders by what has changed since they were asked early: they are asked again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, random_split

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Makes(Regression):
    """Makes its loader by a number; counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.asked, self.noted = 0, 0, list[int]()

    def seed(self) -> int:
        return self.number

    def train_dataloader(self) -> Any:
        self.asked += 1
        self.noted.append(self.seed())
        return loader(8, seed=self.seed() + self.asked)


class ByFitStart(Makes):
    def on_fit_start(self) -> None:
        self.number = 3


class ByPrivate(Makes):
    """By what no other class is to see, and by its hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self._own = 1
        self.save_hyperparameters()

    def seed(self) -> int:
        return self._own + int(self.hparams.get("more", 0))

    def on_fit_start(self) -> None:
        if self.current_epoch:
            self.hparams["more"] = 9
        else:
            self._own = 3


class ByOptimizers(Makes):
    def configure_optimizers(self) -> Any:
        self.number = 5
        return super().configure_optimizers()


class ByCheckpoint(Makes):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["number"] = self.number + 7

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.number = checkpoint["number"]


class Counts(Callback):
    """Has a state that goes with the checkpoint."""

    number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number + 9}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number = state_dict["number"]


class ByCallback(Makes):
    def seed(self) -> int:
        return next(one.number for one in self.trainer.callbacks if isinstance(one, Counts))


class InDataModule(LightningDataModule):
    """Its hooks, by what the module has set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return loader(8, seed=self.trainer.lightning_module.number + self.asked)

    def val_dataloader(self) -> Any:
        return loader(8, seed=self.trainer.lightning_module.number)


KINDS = {
    kind.__name__: kind for kind in (Makes, ByFitStart, ByPrivate, ByOptimizers, ByCheckpoint, ByCallback)
}


def made(pipeline: dict[str, Any] | None, kind: str, folder: str) -> tuple[list[Any], dict[str, Tensor]]:
    module, path = KINDS[kind](), f"{folder}/saved.ckpt"
    first = trainer(pipeline, callbacks=[Counts()])
    first.fit(module)
    first.save_checkpoint(path)
    again = KINDS[kind]()
    trainer(pipeline, max_epochs=4, callbacks=[Counts()]).fit(again, ckpt_path=path)
    return [module.asked, module.noted, again.asked, again.noted], weights(again)


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_are_made_by_what_is_there_when_the_loop_asks(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    asked, expected = made(None, kind, str(tmp_path / "one"))
    found = [made({"stages": 1, "num_microbatches": 2}, kind, str(tmp_path / "ours"))]
    found += ranks(2)(made, {"stages": 2, "num_microbatches": 2}, kind, str(tmp_path / "two"), group=False)
    for own, own_weights in found:
        assert own == asked
        torch.testing.assert_close(own_weights, expected, rtol=1e-9, atol=1e-9)


def in_data_module(pipeline: dict[str, Any] | None) -> tuple[Any, ...]:
    module, data, run = ByFitStart(), InDataModule(), trainer(pipeline)
    run.fit(module, datamodule=data)
    return data.asked, weights(module)


def test_hooks_of_a_data_module_are_asked_again_too(ranks: Ranks) -> None:
    asked, expected = in_data_module(None)
    for own, own_weights in ranks(2)(in_data_module, {"stages": 2, "num_microbatches": 2}, group=False):
        assert own == asked
        torch.testing.assert_close(own_weights, expected, rtol=1e-9, atol=1e-9)


ASKED: list[str] = []


class Splits(Regression):
    """Draws from a generator of its own in its hook."""

    changes = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.number = torch.Generator().manual_seed(3), 0

    def on_fit_start(self) -> None:
        self.number = int(self.changes)

    def train_dataloader(self) -> Any:
        ASKED.append(type(self).__name__)
        data, _ = random_split(loader(16).dataset, [8, 8], generator=self.generator)
        return DataLoader(data, batch_size=4)


class SplitsAnew(Splits):
    """And would make another loader by what a later hook sets."""

    changes = True


@pytest.mark.parametrize(("kind", "calls"), [(Splits, 1), (SplitsAnew, 2)])
def test_hooks_are_asked_once_where_nothing_changes(kind: type[Splits], calls: int) -> None:
    found = []
    for pipeline, expected in ((None, 1), ({"stages": 1, "num_microbatches": 2}, calls)):
        ASKED.clear()
        module = kind()
        trainer(pipeline).fit(module)
        assert len(ASKED) == expected
        found.append(weights(module))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


class NotesInAll(Regression):
    """Notes every hook in the same containers and numbers, which all of them change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.by_name, self.names, self.number = list[str](), dict[str, int](), set[str](), 0

    def note(self, name: str) -> None:
        self.calls.append(name)
        self.by_name[name] = self.by_name.get(name, 0) + 1
        self.by_name["all"] = self.by_name.get("all", 10) + 1
        self.names.add(f"{name}{len(self.names)}")
        self.number += 1

    def on_fit_start(self) -> None:
        self.note("fit")

    def train_dataloader(self) -> Any:
        self.note("train")
        assert not hasattr(self, "data"), "as the hook found it, when it is called again"
        self.data = loader(8, seed=self.number + len(self.calls) + len(self.names) + self.by_name["all"])
        return self.data

    def val_dataloader(self) -> Any:
        self.note("val")
        return loader(8, seed=self.number)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("before")
        return batch


def noted(pipeline: dict[str, Any] | None, options: dict[str, Any]) -> list[Any]:
    module = NotesInAll()
    trainer(pipeline, **options).fit(module)
    return [module.calls, module.by_name, module.names, module.number, weights(module)]


@pytest.mark.parametrize("options", [{"num_sanity_val_steps": 0}, {}], ids=str)
def test_what_a_hook_notes_between_others_notes_is_there_once(ranks: Ranks, options: dict[str, Any]) -> None:
    *expected, expected_weights = noted(None, options)
    found = [noted({"stages": 1, "num_microbatches": 2}, options)]
    found += ranks(2)(noted, {"stages": 2, "num_microbatches": 2}, options, group=False)
    for *own, own_weights in found:
        assert own == expected
        torch.testing.assert_close(own_weights, expected_weights, rtol=1e-9, atol=1e-9)
