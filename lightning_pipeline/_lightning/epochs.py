"""Where an epoch's loop stands, and what follows its end; private names of Lightning's loops."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

from lightning.pytorch import Trainer

# What the loops count, and what holds it. Since 1.5.
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress

from lightning_pipeline.patching import patch

__all__ = [
    "after_epoch",
    "batches_of_epoch",
    "current_hook",
    "fetches_ahead",
    "hold_schedulers",
    "is_last_batch",
    "progress_of",
    "restore",
    "resume_from",
    "silence_unresumable_loaders",
    "validate_by_the_clock_of",
]


def after_epoch(trainer: Trainer, call: Callable[[], None]) -> Callable[[], None]:
    """Call something after all hooks of a training epoch's end; gives the undoing. Since 2.0.

    No public hook comes last: callbacks that monitor come after the module's, and any may ask to stop.
    """
    loop: Any = trainer.fit_loop
    original = loop.on_advance_end

    def on_advance_end() -> None:
        original()
        call()

    return patch(loop, "on_advance_end", on_advance_end)


def silence_unresumable_loaders() -> Callable[[], None]:
    """Lightning warns of a loader that does not go to its place by itself; gives the undoing. Since 2.0.

    It warns where the epoch's loop is set back, and cannot know that somebody else goes there.
    """
    filters, before = cast(list[Any], warnings.filters), len(warnings.filters)
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    ours = filters[0]
    users = len(filters) == before  # the user has the same

    def undo() -> None:
        if not users and ours in warnings.filters:
            cast(list[Any], warnings.filters).remove(ours)

    return undo


def resume_from(trainer: Trainer, choose: Callable[[], str | None]) -> Callable[[], None]:
    """Let `fit` go on from a checkpoint chosen once callbacks are set up; gives the undoing. Since 1.5.

    A path that the user gave wins. `trainer.ckpt_path` has to be set before `fit`, when no folder is known.
    """
    connector: Any = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        original(checkpoint_path or choose(), weights_only)

    return patch(connector, "resume_start", resume_start)


def restore(trainer: Trainer, path: Any) -> None:
    """Load what stands in a checkpoint but for optimizers, schedulers and loops. Since 1.5.

    For a strategy that loads after its setup, Lightning does so after `on_fit_start`. To be deleted when it
    asks before.

    Args:
        trainer: Of the run.
        path: Of the checkpoint, if there is one.
    """
    connector: Any = trainer._checkpoint_connector
    connector._restore_modules_and_callbacks(path)


def hold_schedulers(trainer: Trainer, is_left_out: Callable[[], bool]) -> Callable[[], None]:
    """Leave schedulers by steps as they are after a step that was left out; gives the undoing. Since 1.6.

    Lightning steps them after every batch of an optimizer step, also where a gradient scaler took none.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    original = loop.update_lr_schedulers

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not is_left_out():
            original(interval, update_plateau_schedulers)

    return patch(loop, "update_lr_schedulers", update_lr_schedulers)


def validate_by_the_clock_of(
    trainer: Trainer, decided: Callable[[Callable[[], bool]], bool]
) -> Callable[[], None]:
    """With `Trainer(val_check_interval=<time>)` let one rank say when; gives the undoing. Since 2.6.

    Lightning lets each rank read a clock of its own.

    Args:
        trainer: Of a run that trains.
        decided: Asks the rank that reads its clock; told how. All ranks call it after each batch.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    original = loop._should_check_val_fx
    if getattr(trainer, "_val_check_time_interval", None) is None:
        return lambda: None
    return patch(loop, "_should_check_val_fx", lambda fetcher: decided(lambda: original(fetcher)))


def current_hook(trainer: Trainer) -> str | None:
    """The hook that runs now; `None` between hooks. Since 1.5."""
    module = trainer.lightning_module
    return None if module is None else module._current_fx_name


def is_last_batch(trainer: Trainer) -> bool:
    """Whether the training loop has come to the last batch of its data. Since 2.0."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def batches_of_epoch(trainer: Trainer) -> int:
    """Batches that the training loop has turned to in this epoch. Since 1.6."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def fetches_ahead(fetcher: Any) -> bool:
    """Whether a fetcher reads batches when it is iterated: of loaders without a length. Since 2.0."""
    return fetcher.length is None


def progress_of(trainer: Trainer) -> Iterator[tuple[str, dict[str, Any]]]:
    """How far the loops are: the numbers of each tracker, with its name. They stay the same dictionaries.

    `trainer.global_step` and its like are read from them. Since 1.5.
    """
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    pending: list[tuple[str, Any]] = [(f"trainer.{name}", getattr(trainer, name)) for name in loops]
    for label, held in pending:
        if isinstance(held, _BaseProgress):
            yield f"{label}.", vars(held)
        kinds = (_Loop, _BaseProgress)
        pending += [(f"{label}.{name}", one) for name, one in vars(held).items() if isinstance(one, kinds)]
