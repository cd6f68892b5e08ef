"""Private names of Lightning that have to do with logging; the others are in `_lightning.py`.

Checked against lightning 2.6.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer

from lightning_pipeline.patching import all_undone, patch


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
