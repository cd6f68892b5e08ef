"""Lightning's model summary, of the whole module: printed before it is split."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary

from lightning_pipeline.data import seeded
from lightning_pipeline.patching import all_undone, patch


def _said_already(*_: Any) -> None:
    """Stands for `on_fit_start` of a summary that was printed before the split."""


def summarize_before_split(trainer: Trainer) -> Callable[[], None]:
    """Print what `on_fit_start` would print after the split, when this rank has one stage.

    Args:
        trainer: About to fit.

    Returns:
        Undoes what was changed about the callbacks.
    """
    summaries = [c for c in getattr(trainer, "callbacks", ()) if isinstance(c, ModelSummary)]
    for summary in summaries:
        with seeded(0):  # an example_input_array runs the module
            summary.on_fit_start(trainer, trainer.lightning_module)
    return all_undone([patch(summary, "on_fit_start", _said_already) for summary in summaries])
