"""What a module, its callbacks and its Trainer must not ask of a pipeline. All of it is said at once."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeline._lightning import (
    STEPS,
    configured_to_log_graph,
    is_overridden,
    syncs_batch_norm,
    takes,
    time_based_validation,
    uploads_checkpoints,
)
from lightning_pipeline.settings import Problems

_REFUSED: tuple[tuple[type[Callback], str], ...] = (
    (WeightAveraging, "averages the whole model's parameters by position, and a rank holds one stage"),
    (
        StochasticWeightAveraging,
        "averages the whole model's parameters by position, and a rank holds one stage",
    ),
    (BatchSizeFinder, "tries sizes until one rank is out of memory, and the others wait for it"),
    (ModelPruning, "ranks the parameters of the whole model, and a rank holds one stage"),
)


def check_run(module: LightningModule) -> None:
    """Refuse what cannot work, before anything is placed.

    Args:
        module: Attached to its Trainer.

    Raises:
        ConfigurationError: Naming everything found.
    """
    problems = Problems()
    trainer = module.trainer
    if trainer.state.fn == TrainerFn.FITTING:
        problems.extend(_training(module))
    problems.extend(_steps(module))
    problems.extend(_trainer(trainer))
    problems.extend(_callbacks(trainer))
    problems.refuse(f"{type(module).__name__} cannot run with PipelineStrategy")


def _training(module: LightningModule) -> Iterator[str]:
    if not is_overridden("training_step", module):
        yield "it has no training_step: write one that returns the loss"
    if not is_overridden("configure_optimizers", module):
        yield "it has no configure_optimizers: write one that returns an optimizer"
    if not module.automatic_optimization:
        yield (
            "automatic_optimization=False: manual optimization runs backward inside training_step, where the "
            "other stages are not there to take part: use automatic optimization"
        )
    if is_overridden("backward", module):
        yield "it overrides backward, but each stage runs its own part of backward per micro-batch: remove it"


def _steps(module: LightningModule) -> Iterator[str]:
    for step in STEPS.values():
        function: Any = getattr(module, step, None)
        if callable(function) and takes(function, "dataloader_iter", explicit=True):
            yield f"{step} takes dataloader_iter, but the strategy must see a batch to split it: take batch"


def _trainer(trainer: Trainer) -> Iterator[str]:
    if time_based_validation(trainer) is not None:
        yield (
            "val_check_interval is a time, which every rank reads off its own clock: give a number of "
            "batches or a share of the epoch"
        )
    if syncs_batch_norm(trainer.strategy) and trainer.strategy.num_replicas > 1:  # type: ignore[attr-defined]
        yield "sync_batchnorm=True does not work across replicas of a pipeline yet: leave it out"
    for logger in trainer.loggers:
        if uploads_checkpoints(logger):
            rank_zero_warn(
                f"{type(logger).__name__}(log_model=...) uploads checkpoints that are one file, and those of "
                "a pipeline are folders: nothing will be uploaded. `lightning-pipeline checkpoint "
                "consolidate` makes one file of a folder"
            )
        if configured_to_log_graph(logger):
            yield f"{type(logger).__name__}(log_graph=True) runs the model on rank 0, which has one stage"


def _callbacks(trainer: Trainer) -> Iterator[str]:
    for callback in getattr(trainer, "callbacks", ()):
        for kind, reason in _REFUSED:
            if isinstance(callback, kind):
                yield f"callback {type(callback).__name__} {reason}: remove it"
