"""The batch that a module is traced with: looked at before the run, which sees the same data as ever."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipeline._lightning import (
    STEPS,
    combined_loader_of,
    evaluation_loop,
    loader_ran_ahead,
    prepared_batch,
    takes,
)
from lightning_pipeline.data.loaders import first_of, seeded


def first_arguments(trainer: Trainer) -> tuple[str, tuple[Any, ...]] | None:
    """The step that this run will call first, and its arguments.

    The loop sets its data up here, earlier than it would, on all ranks; fit keeps what it made.

    Args:
        trainer: In `fit`, `validate`, `test` or `predict`.

    Returns:
        Name and arguments; `None` when there is no data, so that nothing will run.
    """
    function = trainer.state.fn
    assert function is not None, "a Trainer that runs knows what"
    if function == TrainerFn.FITTING:
        trainer.fit_loop.setup_data()
        batch = _peek(trainer.fit_loop, trainer, sequential=False)
        if batch is None and trainer.enable_validation:  # the sanity check runs all the same
            function = TrainerFn.VALIDATING
    if function != TrainerFn.FITTING:
        with seeded(0):  # this loop sets its data up again when it runs
            loop = evaluation_loop(trainer)
            loop.setup_data()
            batch = _peek(loop, trainer, sequential=True)
    if batch is None:
        return None
    step = STEPS[function]
    return step, _step_arguments(trainer, step, batch[0], sequential=function != TrainerFn.FITTING)


def _peek(loop: Any, trainer: Trainer, *, sequential: bool) -> tuple[Any] | None:
    combined = combined_loader_of(loop)
    limits = loop.max_batches
    if combined is None or not any(limits if isinstance(limits, list) else [limits]):
        return None
    ahead = [] if sequential else loader_ran_ahead(loop)
    with seeded(0), torch.no_grad():
        try:
            batch = ahead[0][0] if ahead else first_of(_loaders(combined, sequential))
        except StopIteration:
            return None
        batch = prepared_batch(trainer, batch)
        return (trainer.strategy.batch_to_device(batch, dataloader_idx=0),)


def _loaders(combined: Any, sequential: bool) -> Any:
    return combined.flattened[0] if sequential else combined.iterables


def _step_arguments(trainer: Trainer, step: str, batch: Any, *, sequential: bool) -> tuple[Any, ...]:
    """As the loops build them: the batch, its index and the loader's where the step takes them."""
    function = getattr(trainer.lightning_module, step)
    arguments: list[Any] = [batch]
    if takes(function, "batch_idx", min_args=2):
        arguments.append(0)
    combined = combined_loader_of(evaluation_loop(trainer)) if sequential else None
    if combined is not None and len(combined.flattened) > 1:
        arguments.append(0)
    return tuple(arguments)
