"""What the first batches may touch of a Trainer and its module, and is put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_pipeline.model.tensors import ModuleState, ObjectState
from lightning_pipeline.ranks import Outlet


@contextmanager
def as_the_loop_will(trainer: Trainer, step: str) -> Iterator[None]:
    """Inside, the module is in the mode in which the loop calls the step; at the end all is as before.

    Args:
        trainer: In its setup.
        step: To be traced.
    """
    attributes = dict(vars(trainer))
    modes = [(part, part.training) for part in trainer.lightning_module.modules()]
    if step != "training_step":
        trainer.lightning_module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        vars(trainer).clear()
        vars(trainer).update(attributes)


@contextmanager
def hooks_undone(trainer: Trainer) -> Iterator[None]:
    """Inside, what the user's transfer hooks note in the module or data module is forgotten at the end.

    Args:
        trainer: Whose first batch is looked at before the run.
    """
    data: Any = getattr(trainer, "datamodule", None)
    attributes = {} if data is None else dict(vars(data))
    state = ModuleState(trainer.lightning_module)
    containers = ObjectState({name: value for name, value in attributes.items() if name != "trainer"})
    try:
        yield
    finally:
        state.restore()
        containers.restore()
        if data is not None:
            vars(data).clear()
            vars(data).update(attributes)


def seed_of_run(from_rank_zero: Outlet) -> int:
    """The seed that all ranks draw from in steps: rank 0's."""
    return int(from_rank_zero.share(torch.initial_seed)) % 2**63


def beside_module(trainer: Trainer) -> list[Any]:
    """What a step can reach and change beside the module: data module, optimizers' groups, schedulers."""
    data = getattr(trainer, "datamodule", None)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [optimizer.param_groups for optimizer in trainer.optimizers]
    return [*([] if data is None else [data]), *groups, *schedulers]


@contextmanager
def loggers_set_aside(trainer: Trainer) -> Iterator[None]:
    """Inside, what a step gives to `self.logger` is dropped."""
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
