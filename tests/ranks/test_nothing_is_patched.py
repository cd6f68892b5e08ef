"""After a run, and after a failed one, nothing of Lightning, torch or the user is replaced any more."""

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_pipeline.patching import standing
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
TORCH = (
    "torch", "torch.nn.functional", "torch.nn.utils.clip_grad", "torch.utils.checkpoint", "torch.optim.optimizer",
    "torch.autograd.graph", "torch.autograd", "torch.random", "torch.nn.modules.module", "random", "numpy.random",
)  # fmt: skip
CLASSES = ("lightning.pytorch", "torchmetrics", "torch.optim", "torch.nn", "torch.utils.data")
FORMS = (type(lambda: 0), functools.partial, type(print), property, classmethod, staticmethod)


def functions_of(owner: Any) -> dict[str, int]:
    """Identity of everything callable that an object, class or module has of its own."""
    return {name: id(value) for name, value in vars(owner).items() if isinstance(value, FORMS)}


def libraries() -> dict[str, dict[str, int]]:
    """Functions of modules and methods of classes that a run could replace."""
    found = {name: functions_of(sys.modules[name]) for name in TORCH if name in sys.modules}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.startswith(CLASSES):
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    found[f"{name}.{key}"] = functions_of(value)
    return found


def instances(run: pl.Trainer, module: pl.LightningModule) -> dict[str, tuple[type, dict[str, int]]]:
    """Class and replaced methods of the objects of a run."""
    loops = [run.fit_loop, run.fit_loop.epoch_loop, run.validate_loop, run.fit_loop.epoch_loop.val_loop]
    owners = {f"module {name}": part for name, part in module.named_modules()}
    owners |= {f"callback {index}": one for index, one in enumerate(run.callbacks)}
    owners |= {f"loop {index}": one for index, one in enumerate(loops)}
    owners |= {"trainer": run, "signals": run._signal_connector, "logs": run._logger_connector}
    owners |= {"data": run._data_connector, "profiler": run.profiler}
    return {name: (type(one), functions_of(one)) for name, one in owners.items()}


class Fails(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("boom")


def left_behind(pipeline: dict[str, Any], folder: str, fails: bool) -> list[str]:
    trainer(pipeline, max_epochs=1).fit(Regression(), loader(), loader(seed=4))  # imports what a run imports
    module = Regression()
    callbacks: list[Callback] = [ModelCheckpoint(folder, save_last="link", monitor="val_loss")]
    run = trainer(pipeline, callbacks=callbacks + [Fails()] * fails, max_epochs=1, enable_checkpointing=True)
    before = libraries(), instances(run, module), list(map(type, run.callbacks))
    try:
        run.fit(module, loader(), loader(seed=4))
    except ValueError:
        assert fails
    after = libraries(), instances(run, module), list(map(type, run.callbacks))
    found = [f"callbacks {before[2]} {after[2]}"] if before[2] != after[2] else []
    for was, now in zip(before[:2], after[:2], strict=True):
        for name in was:
            if was[name] != now.get(name):
                found.append(f"{name}: {difference(was[name], now.get(name))}")
    return found + standing()


def difference(was: Any, now: Any) -> Any:
    if isinstance(was, tuple) and isinstance(now, tuple):
        return (was[0], now[0]) if was[0] is not now[0] else difference(was[1], now[1])
    if isinstance(was, dict) and isinstance(now, dict):
        return sorted(key for key in was | now if was.get(key) != now.get(key))
    return was, now


@pytest.mark.parametrize("fails", [False, True], ids=["whole run", "failed run"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_run_leaves_nothing_replaced(ranks: Ranks, tmp_path: Any, schedule: str, fails: bool) -> None:
    pipeline = {"stages": 2, "num_microbatches": 2, "schedule": schedule}
    outcomes = ranks(2).outcomes(left_behind, pipeline, str(tmp_path), fails, group=False)
    assert [outcome.value for outcome in outcomes] == [[], []], outcomes


def used_again(folder: str) -> list[str]:
    """A checkpoint callback in a run over stages, and then in one of this process alone."""
    callback = ModelCheckpoint(folder, save_last="link", every_n_train_steps=1)
    options: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True, "max_epochs": 1}
    trainer({"stages": 2, "num_microbatches": 2}, **options).fit(Regression(), loader(), loader(seed=4))
    launched = {name: value for name, value in os.environ.items() if "RANK" in name or "WORLD" in name}
    callback.dirpath = f"{folder}/{launched['RANK']}"
    alone = {name: value for name, value in os.environ.items() if name not in launched}
    with mock.patch.dict(os.environ, alone, clear=True):
        run = trainer(None, **options)
        run.fit(Regression(), loader(), loader(seed=4))
    return sorted(os.listdir(callback.dirpath))


def test_a_callback_can_be_used_again_without_the_strategy(ranks: Ranks, tmp_path: Any) -> None:
    for files in ranks(2)(used_again, str(tmp_path), group=False):
        assert files == ["epoch=0-step=3.ckpt", "last.ckpt"]
