"""The module and the batch that `lightning-pipeline plan` plans for, made from the user's classes."""

import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader

from lightning_pipeline._lightning import is_overridden
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.model.construction import without_weights

_LONGEST = 300  # characters of what the user's code says


def made_module(make: Callable[[], LightningModule], name: str, *, weights: bool) -> LightningModule:
    """Build a module, without weights where that is possible.

    Args:
        make: Builds it.
        name: Of its class.
        weights: Whether it is to have them.

    Raises:
        ConfigurationError: Its code fails.
    """
    if not weights:
        try:
            return without_weights(make)
        except Exception as error:
            failed = _reason(error)
    with _blamed(f"{name} cannot be built"):
        module = make()
    if not weights:
        warnings.warn(
            f"{name} is built with its weights, for without them it fails with {failed}",
            stacklevel=2,
        )
    return module


def made_data(make: Callable[[], LightningDataModule], name: str) -> LightningDataModule:
    """Build a LightningDataModule.

    Args:
        make: Builds it.
        name: Of its class.

    Raises:
        ConfigurationError: Its code fails.
    """
    with _blamed(f"{name} cannot be built"):
        return make()


def first_batch(source: LightningModule | LightningDataModule) -> Any:
    """The first training batch of a module or a data module, as a Trainer would get it.

    Args:
        source: Whose `prepare_data`, `setup("fit")` and `train_dataloader` are called.

    Raises:
        ConfigurationError: There is no loader or batch, or a hook fails.
    """
    if not is_overridden("train_dataloader", source):
        raise ConfigurationError(
            "no batch: name a LightningDataModule with --data, or shapes with --batch, such as "
            "--batch 8,2048:int64"
        )
    name = type(source).__name__
    for hook, arguments in (("prepare_data", ()), ("setup", ("fit",))):
        with _without_trainer(hook, name):
            getattr(source, hook)(*arguments)
    with _without_trainer("train_dataloader", name):
        for batch in _batches(source.train_dataloader()):
            return batch
    raise ConfigurationError(f"the train_dataloader of {name} is empty")


def _batches(loaders: Any) -> Iterator[Any]:
    """Of one loader, or of several together as the Trainer combines them."""
    if isinstance(loaders, list | tuple | Mapping):
        loaders = CombinedLoader(loaders, "max_size_cycle")
    if isinstance(loaders, CombinedLoader):
        return (batch for batch, _, _ in loaders)
    return iter(loaders)


def _without_trainer(hook: str, name: str) -> Any:
    return _blamed(
        f"{hook} of {name} fails without a Trainer", "; the batch's shapes will do: --batch 8,2048:int64"
    )


@contextmanager
def _blamed(what: str, mend: str = "") -> Iterator[None]:
    """Report what goes wrong in the user's code in one line."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{what}: {_reason(error)}{mend}") from error


def _reason(error: BaseException) -> str:
    """What the user's code raised; jsonargparse wraps that."""
    while error.__cause__ is not None and _raised_in(error).startswith("jsonargparse"):
        error = error.__cause__
    return f"{type(error).__name__}: {textwrap.shorten(str(error), _LONGEST, placeholder=' ...')}"


def _raised_in(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")) if frames else ""
