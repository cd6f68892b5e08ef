"""Private names of Lightning that have to do with logging; the others are in `_lightning.py`.

Checked against lightning 2.6.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import Tensor
from torchmetrics import Metric

from lightning_pipeline.patching import all_undone, patch

_KEPT = {"callback_metrics": "callback", "logged_metrics": "log", "progress_bar_metrics": "pbar"}
_SIGNATURES = {name: inspect.signature(getattr(LightningModule, name)) for name in ("log", "log_dict")}


def logging_step(trainer: Trainer) -> int:
    """The step under which loggers get what is logged now; as Lightning's own monitors ask. Since 2.0."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logs_this_batch(trainer: Trainer) -> bool:
    """Whether loggers get this training batch's metrics, known from the batch's start on. Since 2.0.

    As `should_update_logs` decides it, but for `should_stop`, on which ranks need not agree yet.
    """
    loop, every = trainer.fit_loop.epoch_loop, int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
    if loop._should_accumulate() and trainer.lightning_module.automatic_optimization:
        return False
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector, as is log_every_n_steps
        return True
    return every > 0 and (loop._batches_that_stepped + 1) % every == 0


class LogPlace(NamedTuple):
    """Where Lightning stands while `self.log` is called.

    Attributes:
        hook: The hook that runs.
        dataloader_idx: Of an evaluation with several loaders.
        batch_size: Of the running batch, where Lightning has worked it out.
    """

    hook: str
    dataloader_idx: int | None
    batch_size: int | None


def log_place(module: LightningModule) -> LogPlace:
    """What `self.log` goes by besides its arguments. Since 1.5."""
    results = module.trainer._results
    return LogPlace(
        str(module._current_fx_name),
        getattr(results, "dataloader_idx", None),
        getattr(results, "batch_size", None),
    )


@contextmanager
def logging_at(module: LightningModule, place: LogPlace, *, reset: bool) -> Iterator[None]:
    """Let `self.log` believe that another hook runs. Since 1.5.

    Args:
        module: The LightningModule.
        place: Of that hook.
        reset: Whether its first call in an epoch is still to come, which clears the values of the last one.
    """
    connector, results = module.trainer._logger_connector, module.trainer._results
    before = module._current_fx_name, connector._current_fx, getattr(results, "dataloader_idx", None)
    module._current_fx_name = place.hook
    if not reset:
        connector._current_fx = place.hook
    if results is not None:
        results.dataloader_idx = place.dataloader_idx
    try:
        yield
    finally:
        module._current_fx_name, connector._current_fx, index = before
        if results is not None:
            results.dataloader_idx = index


def before_loader_results(trainer: Trainer, call: Callable[[], None]) -> Callable[[], None]:
    """Call something when an evaluation is done with a loader, before its logs are summed up. Since 2.0.

    Returns:
        Undoes it.
    """
    loops: list[Any] = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]

    def wrap(original: Callable[[], None]) -> Callable[[], None]:
        def store() -> None:
            call()
            original()

        return store

    return all_undone(
        [patch(loop, "_store_dataloader_outputs", wrap(loop._store_dataloader_outputs)) for loop in loops]
    )


def shown_to_steps(
    trainer: Trainer, logged: Callable[[], Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]]]
) -> Callable[[], None]:
    """Let a step find what it has just logged in the Trainer's `callback_metrics` and the like. Since 2.0.

    Args:
        trainer: Of the run.
        logged: What the run of a step has logged so far: method, arguments; nothing outside of steps.

    Returns:
        Undoes it.
    """
    connector, kind = trainer._logger_connector, type(trainer._logger_connector)

    def shown(name: str) -> property:
        original: Any = getattr(kind, name)

        def read(self: Any) -> dict[str, Any]:
            found: dict[str, Any] = original.fget(self)
            calls = logged() if self is connector else ()
            return {**found, **_kept(trainer, calls, _KEPT[name])} if calls else found

        return property(read)

    return all_undone([patch(kind, name, shown(name)) for name in _KEPT])


def _kept(
    trainer: Trainer, calls: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]], where: str
) -> dict[str, Any]:
    """What calls of `log` and `log_dict` leave at once, as `_ResultCollection.metrics` has it. Since 1.5."""
    module, place = trainer.lightning_module, log_place(trainer.lightning_module)
    hook = place.hook if place.hook.endswith("_step") else "training_step"
    kept: dict[str, Any] = {}
    for method, args, kwargs in calls:
        given = dict(_SIGNATURES[method].bind(module, *args, **kwargs).arguments)
        several = given["dictionary"].items() if method == "log_dict" else [(given["name"], given["value"])]
        on_step, on_epoch = _FxValidator.get_default_logging_levels(
            hook, given.get("on_step"), given.get("on_epoch")
        )
        shows = {
            "callback": trainer.training,
            "log": given.get("logger") is not False,
            "pbar": given.get("prog_bar", False),
        }
        if not on_step or not shows[where]:
            continue
        adds = given.get("add_dataloader_idx", True) and place.dataloader_idx is not None
        ending = f"/dataloader_idx_{place.dataloader_idx}" if adds else ""
        for name, value in several:
            number = _number(value, module.device)
            if number is None:
                continue
            forked = f"{name}_step" if on_epoch else name
            kept.update({f"{forked}{ending}": float(number) if where == "pbar" else number})
            if where == "callback":
                kept[f"{name}{ending}"] = number
    return kept


def _number(value: Any, device: torch.device) -> Tensor | None:
    if isinstance(value, Metric):
        value = value._forward_cache  # what its last call has given. Since 0.2
    elif not isinstance(value, Tensor):
        value = torch.tensor(float(value), dtype=torch.get_default_dtype(), device=device)
    return value.detach().reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else None
