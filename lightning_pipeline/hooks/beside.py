"""What a step can change beside the module: data module, callbacks, optimizers, globals, classes."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_pipeline.model.tensors import are_the_users, attributes_of, objects_below
from lightning_pipeline.model.trace import ClassOwner, FoundOwner, Owner

_OF_LIGHTNING = ("trainer", "_trainer", "_log_hyperparams", "_hparams", "_hparams_name", "_hparams_initial")


def owners_beside(trainer: Trainer) -> list[Owner]:
    """Whose entries a step may change, with labels that are the same on every rank.

    Args:
        trainer: From its setup on. Optimizers and schedulers are among them when it has them.
    """
    return [*_objects(trainer), *_optimizers(trainer), *_code_of(trainer.lightning_module)]


def _objects(trainer: Trainer) -> Iterator[Owner]:
    data = getattr(trainer, "datamodule", None)
    if data is not None and are_the_users(type(data).__module__):
        yield Owner(vars(data), "datamodule.", _OF_LIGHTNING)
        held = {name: value for name, value in vars(data).items() if name not in _OF_LIGHTNING}
        yield from _below(held, "datamodule")
    for number, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]  # set by a connector
        if are_the_users(type(callback).__module__):
            yield Owner(vars(callback), f"callback {number} {type(callback).__name__}.")


def _below(held: dict[str, Any], label: str) -> Iterator[Owner]:
    """Plain objects of the user's among these, and below them."""
    for name, value in held.items():
        entries = attributes_of(value)
        if entries is not None and not isinstance(value, Trainer | Callback):
            yield Owner(entries, f"{label}.{name}.")
            for number, inner in enumerate(objects_below([value])):
                if inner is not value:
                    yield Owner(vars(inner), f"{label}.{name} {number} {type(inner).__name__}.")


def _optimizers(trainer: Trainer) -> Iterator[Owner]:
    """Looked up each time, for loading a state makes new groups."""
    made = trainer.strategy._own_optimizers if hasattr(trainer.strategy, "_own_optimizers") else []
    for number, optimizer in enumerate(made):
        for place in range(len(optimizer.param_groups)):
            yield FoundOwner(_group(optimizer, place), f"optimizer {number}, group {place}: ", ("params",))
    configs = trainer.strategy._schedulers if hasattr(trainer.strategy, "_schedulers") else []
    for number, config in enumerate(configs):
        yield Owner(vars(config.scheduler), f"scheduler {number}: ", ("optimizer", "step"))


def _group(optimizer: Any, place: int) -> Callable[[], dict[Any, Any]]:
    def find() -> dict[Any, Any]:
        groups: list[dict[Any, Any]] = optimizer.param_groups
        return groups[place] if place < len(groups) else {}

    return find


def _code_of(module: LightningModule) -> Iterator[Owner]:
    """Attributes of the module's own classes, and the globals that their methods see."""
    files = set()
    for cls in type(module).__mro__:
        if not are_the_users(cls.__module__):
            continue
        yield ClassOwner(cls, f"{cls.__name__}.")
        namespace = getattr(sys.modules.get(cls.__module__), "__dict__", None)
        if namespace is not None and cls.__module__ not in files:
            files.add(cls.__module__)
            own = {name: value for name, value in namespace.items() if not name.startswith("__")}
            yield Owner(namespace, f"global {cls.__module__}.", namespace.keys() - own.keys())
            yield from _below(own, f"global {cls.__module__}")
