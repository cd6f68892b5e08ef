"""What a training step returned, as Lightning reads it. Checked against lightning 2.6."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

# Says what is wrong with what a training step returned. Since 2.0.
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from lightning_pipeline.patching import patch

NO_LOSS = object()
"""What a strategy's `training_step` returns where there is no loss."""


def skip_without_loss(trainer: Trainer) -> Callable[[], None]:
    """Let a batch without a loss be skipped as on one device; gives the undoing.

    Lightning refuses None where there are several ranks, for one of them could be alone with it; here all
    ranks have the same. Since 2.0.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    kind: Any = loop.output_result_cls

    class Result(kind):  # type: ignore[misc]
        @classmethod
        def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
            given = None if training_step_output is NO_LOSS else training_step_output
            return kind.from_training_step_output(given, normalize)

    return patch(loop, "output_result_cls", Result)


def explain_output(kind: type, keys: Sequence[Any]) -> None:
    """Raise what one device raises where a training step returns something else than a loss. Since 2.0.

    Args:
        kind: Class of what it returned.
        keys: Where that is a mapping.
    """
    if issubclass(kind, Mapping):
        if "loss" not in keys:
            ClosureResult.from_training_step_output(dict.fromkeys(keys))
    elif not issubclass(kind, Tensor | None):
        something_else: Any = object()
        ClosureResult.from_training_step_output(something_else)
