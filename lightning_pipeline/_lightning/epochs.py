"""Where an epoch's loop stands, and what follows its end; private names of Lightning's loops."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer

# What the loops count, and what holds it. Since 1.5.
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress

# How many batches of a loader a loop takes. Since 2.0.
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches, _resolve_overfit_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len

from lightning_pipeline._lightning.trainer import (
    STEPS,
    combined_loader_of,
    evaluation_loop,
    is_sequential,
)
from lightning_pipeline.patching import Undo, all_undone, patch

__all__ = [
    "after_epoch",
    "asks_hook",
    "at_first_batch",
    "batches_of_epoch",
    "current_hook",
    "ended_with_a_batch",
    "fetches_ahead",
    "hold_passing",
    "hold_schedulers",
    "is_last_batch",
    "is_of_a_search",
    "loaders_behind",
    "pass_validation",
    "progress_of",
    "progress_shown",
    "restore",
    "resume_from",
    "show_loaders",
    "silence_unresumable_loaders",
    "validate_by_the_clock_of",
    "validates_next",
    "with_state",
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


def validates_next(trainer: Trainer) -> bool:
    """Whether the loop of training turns to a validation after the batch that it ends now. Since 1.5."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    return fetcher is not None and loop._should_check_val_fx(fetcher)


def hold_passing(trainer: Trainer) -> Undo:
    """Lightning passes over no validation of a resumed epoch until this is undone. Since 2.6.

    It passes over that at the end of an epoch which was resumed with no batch left, but asks whether one
    stands there by the number of the epoch that comes.
    """
    return patch(trainer.fit_loop.epoch_loop.val_loop, "increment_progress_to_evaluation_end", lambda: None)


def pass_validation(trainer: Trainer) -> None:
    """Pass over a validation, whose loaders are iterated; a run without one has none of these. Since 2.6."""
    if trainer.enable_validation:
        trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end()


def ended_with_a_batch(trainer: Trainer) -> bool:
    """Whether a resumed run was saved as a batch ended, and before what follows it. Since 2.6."""
    return bool(trainer.fit_loop.epoch_loop.restarted_on_train_batch_end)


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


def restore(trainer: Trainer, path: Any, data: Callable[[Any], bool] = lambda checkpoint: True) -> None:
    """Load what stands in a checkpoint but for optimizers, schedulers and loops. Since 1.5.

    For a strategy that loads after its setup, Lightning does so after `on_fit_start`. To be deleted when it
    asks before.

    Args:
        trainer: Of the run.
        path: Of the checkpoint, if there is one.
        data: Whether the data module, too, as the checkpoint is once `on_load_checkpoint` has seen it.
    """
    connector: Any = trainer._checkpoint_connector
    connector.resume_start(path)
    connector.restore_model()
    if data(connector._loaded_checkpoint):
        connector.restore_datamodule()
    connector.restore_callbacks()


def with_state(trainer: Trainer) -> tuple[str, Callable[[Any], None]] | None:
    """What a data module's state is called in a checkpoint, and what loads it, if anything. Since 1.6."""
    data: Any = getattr(trainer, "datamodule", None)
    if data is None or type(data).load_state_dict is LightningDataModule.load_state_dict:
        return None
    return type(data).__qualname__, data.load_state_dict


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


def is_of_a_search(path: Any) -> bool:
    """Whether a checkpoint is one that a search for a learning rate removes once it has loaded it. Since 1.5.

    Where a step of the search has failed it cannot be loaded, and Lightning does not come to removing it.
    """
    return Path(path).name.startswith(".lr_find_")


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


def asks_hook(trainer: Trainer) -> bool:
    """Whether a run trains, and has its loaders from a hook, which may go by the epoch. Since 1.5."""
    return trainer.state.fn == TrainerFn.FITTING and trainer.fit_loop._data_source.is_module()


@contextmanager
def progress_shown(trainer: Trainer, loops: Mapping[str, Any]) -> Iterator[None]:
    """Inside, `trainer.current_epoch` and the like are what a run that goes on will have. Since 1.5.

    Args:
        trainer: Of the run, which has loaded no loops yet.
        loops: What a checkpoint has of them.
    """
    kept = [(held, dict(held)) for _, held in progress_of(trainer)]
    loop, saved = trainer.fit_loop, loops.get("fit_loop", {})
    inner = loop.epoch_loop
    trackers: dict[str, Any] = {
        "epoch_progress": loop.epoch_progress,
        "epoch_loop.batch_progress": inner.batch_progress,
        "epoch_loop.automatic_optimization.optim_progress": inner.automatic_optimization.optim_progress,
        "epoch_loop.manual_optimization.optim_step_progress": inner.manual_optimization.optim_step_progress,
    }
    try:
        for name, tracker in trackers.items():
            if name in saved:
                tracker.load_state_dict(saved[name])
        yield
    finally:
        for held, values in kept:
            held.update(values)


@contextmanager
def in_sanity_check(trainer: Trainer) -> Iterator[None]:
    """Inside, `trainer.sanity_checking` says so. Since 1.5."""
    before, trainer.state.stage = trainer.state.stage, RunningStage.SANITY_CHECKING
    try:
        yield
    finally:
        trainer.state.stage = before


def loaders_behind(trainer: Trainer, step: str) -> tuple[list[Any], bool]:
    """The loaders whose batches a step is given, and whether it is given one of several at once. Since 2.0.

    None before the loop has them, or `show_loaders` shows it them.
    """
    training = step == STEPS[TrainerFn.FITTING]
    combined = combined_loader_of(trainer.fit_loop if training else evaluation_loop(trainer))
    if combined is None:
        return [], False
    together = not is_sequential(combined) and not any(
        combined.iterables is one for one in combined.flattened
    )
    return list(combined.flattened), together


def _in_order(trainer: Trainer, combined: CombinedLoader, stage: RunningStage) -> CombinedLoader:
    """With `overfit_batches` loops of fit do not shuffle: they take other loaders, and warn. Since 1.5."""
    overfits = trainer.state.fn == TrainerFn.FITTING and trainer.overfit_batches  # type: ignore[attr-defined]
    shuffles = overfits and not any(map(has_iterable_dataset, combined.flattened))
    if not shuffles:
        return combined
    found = CombinedLoader(combined.iterables, combined._mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _resolve_overfit_batches(found, stage)
    return found


def show_loaders(trainer: Trainer, loop: Any, combined: CombinedLoader, limit: int | float) -> Undo:
    """Let a loop that has no loaders yet have these, and count their batches; gives the undoing. Since 2.0.

    What a Trainer tells of its loaders and of its batches is read from there, and the total of its steps too.
    What `setup_data` does besides is left to the loop.

    Args:
        trainer: In its setup.
        loop: Of the Trainer.
        combined: As it will have them.
        limit: Of the Trainer's for this loop, as `limit_train_batches`.
    """
    stages = {
        id(trainer.fit_loop): RunningStage.TRAINING, id(trainer.test_loop): RunningStage.TESTING,
        id(trainer.predict_loop): RunningStage.PREDICTING,
    }  # fmt: skip
    stage = stages.get(id(loop), RunningStage.VALIDATING)
    combined = _in_order(trainer, combined, stage)
    lengths = [_length(one) for one in combined.flattened]
    limits = [_parse_num_batches(stage, length, limit) for length in lengths]
    values: dict[str, Any] = {"_combined_loader": combined}
    if stage is not RunningStage.TRAINING:
        predicts = stage is RunningStage.PREDICTING
        values |= {"max_batches": limits} if predicts else {"_max_batches": limits}
        values |= {"epoch_batch_indices": [[] for _ in limits]} if predicts else {}
        return all_undone([patch(loop, name, value) for name, value in values.items()])
    batches = _length(_SUPPORTED_MODES[combined._mode]["iterator"](combined.flattened, limits))
    every: Any = None
    if getattr(trainer, "_val_check_time_interval", None) is None:
        every = trainer.val_check_interval
    if isinstance(every, float):
        every = max(1, int(batches * every)) if batches != float("inf") else batches
    values["max_batches"] = batches
    undo = [patch(loop, name, value) for name, value in values.items()]
    return all_undone([*undo, patch(trainer, "val_check_batch", every)])


def _length(loader: Any) -> int | float:
    length = sized_len(loader)
    return float("inf") if length is None else length


@contextmanager
def at_first_batch(trainer: Trainer, step: str, *, moving: bool = False) -> Iterator[None]:
    """Inside, the Trainer counts as when it calls a step for the first time; then as before. Since 1.5.

    Args:
        trainer: In its setup.
        step: Its name. A validation step within `fit` belongs to the sanity check.
        moving: Whether the batch is still on its way to the device, where it does not count.
    """
    before, held = trainer.state.stage, list[Any]()
    loop: Any = trainer._active_loop
    if step == "training_step":
        loop = trainer.fit_loop.epoch_loop
        held.append(trainer.fit_loop.epoch_progress)
    elif loop is trainer.fit_loop:
        loop = trainer.fit_loop.epoch_loop.val_loop
        trainer.state.stage = RunningStage.SANITY_CHECKING
    if not moving:
        held.append(loop.batch_progress)
    trackers = [vars(tracker) for one in held for tracker in (one.total, one.current)]
    saved = [dict(numbers) for numbers in trackers]
    for numbers in trackers:
        numbers.update(ready=numbers["ready"] + 1, started=numbers["started"] + 1)
    try:
        yield
    finally:
        trainer.state.stage = before
        for numbers, values in zip(trackers, saved, strict=True):
            numbers.update(values)
