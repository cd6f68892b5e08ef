"""What a step can change beside the module: data module, callbacks, optimizers, globals, classes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeline import _lightning
from lightning_pipeline._lightning import progress_of
from lightning_pipeline.data import holders_of, inner
from lightning_pipeline.model.places import (
    MISSING,
    ClassOwner,
    FileOwner,
    FoundOwner,
    Numbers,
    Owner,
    owners_of,
)
from lightning_pipeline.model.tensors import Code, are_the_users, code_of, objects_below

_OF_LIGHTNING = ("trainer", "_trainer", "_log_hyperparams", "_hparams", "_hparams_name", "_hparams_initial")


class Beside:
    """Finds whose entries a step may change, with labels that are the same on every rank.

    Args:
        trainer: From its setup on. Optimizers and schedulers are among them when it has them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._code: Code | None = None
        readers = [(Trainer, "global_step"), (Trainer, "current_epoch")]
        self._progress = [Numbers(_always(held), label, readers) for label, held in progress_of(trainer)]
        loops = {
            "": trainer,
            "fit_loop.": trainer.fit_loop,
            "fit_loop.epoch_loop.": trainer.fit_loop.epoch_loop,
        }
        settings = (SettingsOwner(vars(one), f"trainer.{name}") for name, one in loops.items())
        self._settings = [*settings, ListsOwner(vars(trainer), "trainer.")]

    def owners(self) -> list[Owner]:
        """All of them, as they are now."""
        if self._code is None:
            self._code = code_of(self._trainer.lightning_module)
        objects, optimizers = list(objects_beside(self._trainer)), list(_optimizers(self._trainer))
        known = {owner.identity for owner in objects}
        loaders = [one for one in _loaders(self._trainer) if one.identity not in known]
        return [
            *objects, *loaders, *optimizers, *owners_in_code(self._code), *self._progress, *self._settings
        ]  # fmt: skip


class SettingsOwner(Owner):
    """Numbers, flags and texts among the attributes of a trainer or loop, such as `should_stop`."""

    def read(self) -> Mapping[Any, Any]:
        """All of them but private ones."""
        return {
            name: value
            for name, value in self._entries.items()
            if isinstance(value, bool | int | float | str | None) and not name.startswith("_")
        }


class ListsOwner(Owner):
    """Lists among the attributes of a trainer, such as its callbacks: put back, not looked at for changes."""

    def read(self) -> Mapping[Any, Any]:
        """All of them."""
        return {name: value for name, value in self._entries.items() if type(value) is list}

    def watches(self, key: Any) -> bool:
        """Whether a change of it counts."""
        return False

    def keeps(self, key: Any) -> bool:
        """Whether it is put back."""
        return True


def objects_beside(trainer: Trainer) -> Iterator[Owner]:
    """Of the user's data module and callbacks, and of plain objects that the data module has."""
    data = getattr(trainer, "datamodule", None)
    if data is not None and are_the_users(type(data).__module__):
        yield Owner(vars(data), "datamodule.", _OF_LIGHTNING)
        yield Numbers(_always(vars(data)), "datamodule.")
        held = {name: value for name, value in vars(data).items() if name not in _OF_LIGHTNING}
        yield from _below(held, "datamodule")
    for number, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]  # set by a connector
        if are_the_users(type(callback).__module__):
            label = f"callback {number} {type(callback).__name__}."
            yield Owner(vars(callback), label)
            yield Numbers(_always(vars(callback)), label)


def owners_at_end(trainer: Trainer) -> list[Owner]:
    """What may keep weights when a run ends, beside the module and callbacks: data module, globals, classes.

    Args:
        trainer: Of the run.
    """
    data = getattr(trainer, "datamodule", None)
    found = [] if data is None else [Owner(vars(data), "datamodule.", _OF_LIGHTNING)]
    return [*found, *owners_in_code(code_of(trainer.lightning_module))]


def _below(held: Mapping[str, Any], label: str) -> Iterator[Owner]:
    """Plain objects of the user's among these, and below them."""
    kept = {name: value for name, value in held.items() if not isinstance(value, Trainer | Callback)}
    for path, one in objects_below([(f"{label}.", kept)]):
        yield from owners_of(one, f"{path}.")


def _loaders(trainer: Trainer) -> Iterator[Owner]:
    """Of loaders, samplers and data sets, which a step reaches by `trainer.train_dataloader`."""
    seen = set[int]()
    for step in ("training_step", "validation_step"):
        for number, loader in enumerate(_lightning.loaders_behind(trainer, step)[0]):
            for place, holder in enumerate(holders_of(inner(loader))):
                if id(holder) in seen or isinstance(holder, FunctionType | Trainer | nn.Module):
                    continue
                seen.add(id(holder))
                label = f"loader {number} of {step}, {type(holder).__name__} {place}"
                own = [name for name in vars(holder) if name.startswith("_")]
                yield Owner(vars(holder), f"{label}.", own if isinstance(holder, DataLoader) else ())
                if are_the_users(type(holder).__module__):
                    yield from _below(vars(holder), label)


def _optimizers(trainer: Trainer) -> Iterator[Owner]:
    """Looked up each time, for loading a state makes new groups."""
    made = trainer.strategy._own_optimizers if hasattr(trainer.strategy, "_own_optimizers") else []
    for number, optimizer in enumerate(made):
        for place in range(len(optimizer.param_groups)):
            group, label = _group(optimizer, place), f"optimizer {number}, group {place}: "
            yield FoundOwner(group, label, ("params",))
            yield Numbers(group, label)
    configs = trainer.strategy._schedulers if hasattr(trainer.strategy, "_schedulers") else []
    for number, config in enumerate(configs):
        yield Owner(vars(config.scheduler), f"scheduler {number}: ", ("optimizer", "step"))


def _always(entries: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    return lambda: entries


def _group(optimizer: Any, place: int) -> Callable[[], dict[Any, Any]]:
    def find() -> dict[Any, Any]:
        groups: list[dict[Any, Any]] = optimizer.param_groups
        return groups[place] if place < len(groups) else {}

    return find


def owners_in_code(code: Code) -> Iterator[Owner]:
    """What stands in classes, in the globals of files, and in and around functions.

    Args:
        code: That a step can reach.
    """
    known = Counter[str]()
    for cls in code.classes:
        known[cls.__name__] += 1
        name = cls.__name__ if known[cls.__name__] == 1 else f"{cls.__module__}.{cls.__qualname__}"
        yield ClassOwner(cls, f"{name}.")
    for file in code.files:
        namespace = vars(file)
        own = {name: value for name, value in namespace.items() if not name.startswith("__")}
        yield FileOwner(namespace, f"global {file.__name__}.")
        yield from _below(own, f"global {file.__name__}")
    for function in code.functions:
        name = f"{function.__module__}.{function.__qualname__}"
        known[name] += 1
        number = "" if known[name] == 1 else f" {known[name]}"
        for owner in (
            CellsOwner(function, f"around {name}{number}."),
            DefaultsOwner(function, f"default of {name}{number}."),
            Owner(vars(function), f"{name}{number}.", ("__wrapped__",)),
        ):
            held = owner.read()
            if held:
                yield owner
                yield from _below(held, owner.label.removesuffix("."))


class CellsOwner(Owner):
    """The variables of enclosing functions that a function uses.

    Args:
        function: That uses them.
        label: Begins the label of each.
    """

    def __init__(self, function: FunctionType, label: str) -> None:
        super().__init__({}, label)
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        self._cells = {name: cell for name, cell in zip(names, cells, strict=True) if name != "__class__"}

    @property
    def identity(self) -> int:
        """Equal for two owners of the same variables."""
        return hash(tuple(map(id, self._cells.values())))

    def read(self) -> Mapping[Any, Any]:
        """Those that are set."""
        found = {}
        for name, cell in self._cells.items():
            with suppress(ValueError):  # not set yet
                found[name] = cell.cell_contents
        return found

    def write(self, key: Any, value: Any) -> None:
        """Set one, or take it away."""
        if value is MISSING:
            del self._cells[key].cell_contents
        else:
            self._cells[key].cell_contents = value


class DefaultsOwner(Owner):
    """What a function's arguments are where nothing is given: a list there lives as long as the function.

    Args:
        function: Whose.
        label: Begins the label of each.
    """

    def __init__(self, function: FunctionType, label: str) -> None:
        super().__init__({}, label)
        self._function = function

    @property
    def identity(self) -> int:
        """Equal for two owners of one function's."""
        return id(self._function)

    def read(self) -> Mapping[Any, Any]:
        """All of them, by position or name."""
        return {**dict(enumerate(self._function.__defaults__ or ())), **(self._function.__kwdefaults__ or {})}

    def write(self, key: Any, value: Any) -> None:
        """Set one."""
        if isinstance(key, int):
            values = list(self._function.__defaults__ or ())
            values[key] = value
            self._function.__defaults__ = tuple(values)
        elif self._function.__kwdefaults__ is not None:
            self._function.__kwdefaults__[key] = value
