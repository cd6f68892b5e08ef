"""When the callbacks log, and how."""

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer

from lightning_pipeline import _lightning
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.measure import PipelineRun


class Publisher:
    """Logs where Lightning logs, or every so many batches; once an epoch at least, for who monitors a key.

    Args:
        every_n_steps: Batches between two times. `None`: the batches of which Lightning's loggers are told.

    Attributes:
        owes: Whether this epoch's batches have not been logged.
        step: Under which loggers get what is logged of the last batch.
    """

    def __init__(self, every_n_steps: int | None) -> None:
        self.every_n_steps = every_n_steps
        self.owes = False
        self.step = 0

    def is_due(self, run: PipelineRun, trainer: Trainer, batches: int) -> bool:
        """Whether a training batch is to be logged; known from its start on, and the same on all ranks.

        Args:
            run: The strategy.
            trainer: In its training.
            batches: So many of this fit, the batch in question included.
        """
        if trainer.barebones:
            return False
        self.step = _lightning.logging_step(trainer)  # at an epoch's end it is one more
        if self.every_n_steps is None:
            return _lightning.logs_this_batch(trainer)
        return batches % self.every_n_steps == 0

    def publish(
        self, run: PipelineRun, trainer: Trainer, values: Mapping[str, float], step: int | None = None
    ) -> None:
        """Log many values at once, for loggers and for callbacks that monitor a key; all ranks call.

        `self.log` takes 0.4 ms a key; Lightning's LearningRateMonitor, too, goes this way. Nothing happens in
        a `barebones` run; loggers are told nothing if the Trainer has them logged to every 0 steps.

        Args:
            run: The strategy.
            trainer: In its training.
            values: By key, the same on all ranks.
            step: For loggers. Default: that of the last batch.
        """
        self.owes = False
        if trainer.barebones:
            return
        on_device = torch.tensor(list(values.values()), dtype=torch.float32).to(run.root_device)
        tensors = dict(zip(values, on_device.unbind(), strict=True))
        trainer.callback_metrics.update(tensors)
        trainer.logged_metrics.update(tensors)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        for logger in trainer.loggers if every or self.every_n_steps else ():
            logger.log_metrics(dict(values), step=self.step if step is None else step)


def check_counts(callback: object, **counts: object) -> None:
    """Refuse arguments of a callback that are no numbers of steps or epochs.

    Args:
        callback: Whose they are.
        counts: By name; `None` passes.

    Raises:
        ConfigurationError: Naming all that are not whole numbers from 1 on.
    """
    refuse(callback, [count_problem(name, value) for name, value in counts.items()])


def count_problem(name: str, value: object) -> str:
    """What is wrong with a number of steps or epochs; empty if nothing is."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return ""
    return f"{name}={value!r} must be a whole number of at least 1"


def refuse(callback: object, problems: list[str]) -> None:
    """Raise with all problems, if there are any.

    Raises:
        ConfigurationError: There are.
    """
    told = [problem for problem in problems if problem]
    if told:
        raise ConfigurationError(f"{type(callback).__name__}: {'; '.join(told)}")
