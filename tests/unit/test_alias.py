"""`pytorch_lightning` and `lightning.pytorch` as one package."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator

import lightning.pytorch as pl
import pytest

import lightning_pipeline
from lightning_pipeline import PipelineStrategy, alias_pytorch_lightning

OTHERS = ("pytorch_lightning", "lightning_fabric")


@pytest.fixture
def neither_is_imported() -> Iterator[None]:
    """As in a new process, and afterwards as before."""
    before, finders = dict(sys.modules), list(sys.meta_path)
    for name in before:
        if name.partition(".")[0] in OTHERS:
            del sys.modules[name]
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in OTHERS:
            del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("neither_is_imported")
def test_both_names_are_one_package() -> None:
    alias_pytorch_lightning()
    alias_pytorch_lightning()
    other = importlib.import_module("pytorch_lightning")
    callbacks = importlib.import_module("pytorch_lightning.callbacks.early_stopping")
    fabric = importlib.import_module("lightning_fabric.utilities.seed")
    assert other is pl and callbacks.EarlyStopping is pl.callbacks.EarlyStopping
    assert fabric.seed_everything is pl.seed_everything
    for module, name in (
        (other, "lightning.pytorch"),
        (callbacks, "lightning.pytorch.callbacks.early_stopping"),
    ):
        assert module.__spec__ is not None and module.__spec__.name == module.__name__ == name
    assert importlib.util.find_spec("pytorch_lightning.nothing_of_this_name") is None


@pytest.mark.usefixtures("neither_is_imported")
def test_a_trainer_by_the_other_name_takes_the_strategy() -> None:
    lightning_pipeline.alias_pytorch_lightning()
    other = importlib.import_module("pytorch_lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = PipelineStrategy(stages=2)
    trainer = other.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    assert trainer.strategy is strategy


def test_a_package_that_is_imported_already_is_named() -> None:
    importlib.import_module("pytorch_lightning")
    with pytest.raises(ImportError, match=r"^pytorch_lightning has been imported already"):
        alias_pytorch_lightning()
