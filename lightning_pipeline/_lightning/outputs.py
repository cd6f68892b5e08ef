"""What a step returned, as Lightning reads it and hands it on. Checked against lightning 2.6."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

# Says what is wrong with what a training step returned. Since 2.0.
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_pipeline.errors import SplitError
from lightning_pipeline.patching import Undo, all_undone, patch

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


def evaluate_with_versions(trainer: Trainer) -> Undo:
    """Let loops evaluate under `no_grad`, as they do over gloo; gives the undoing. Since 1.8.

    Over other backends Lightning takes `inference_mode`, whose tensors do not count what is written to them:
    replay could not tell a value that arrived from what a step made of it in place.
    """
    fit: Any = trainer.fit_loop.epoch_loop.val_loop
    loops = fit, trainer.validate_loop, trainer.test_loop, trainer.predict_loop
    return all_undone([patch(loop, "inference_mode", False) for loop in loops])


_BATCH_ENDS = {"validation_step": "on_validation_batch_end", "test_step": "on_test_batch_end"}


def reads_outputs(trainer: Trainer, step: str) -> bool:
    """Whether a hook of the user's may read what an evaluated batch's step returned. Since 1.8.

    Args:
        trainer: Of the run.
        step: Name of the user's method.
    """
    hook = _BATCH_ENDS.get(step)
    if hook is None:
        return False
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return is_overridden(hook, trainer.lightning_module) or any(
        hook in vars(callback) or _is_users(type(callback), hook) for callback in callbacks
    )


def _is_users(kind: type, hook: str) -> bool:
    owner = next(one for one in kind.__mro__ if hook in vars(one))
    return owner.__module__.partition(".")[0] not in ("lightning", "lightning_pipeline")


_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "scatter",
    "scatter_object_list",
)  # fmt: skip


def write_predictions_once(trainer: Trainer, *, has: bool) -> Undo:
    """Let prediction writers run on the ranks that have predictions alone; gives the undoing. Since 1.5.

    Elsewhere they would write `None`, and often over what a rank that has them writes by the same name.

    Args:
        trainer: Of the run.
        has: Whether this rank has them. What a writer asks of all ranks raises there: they do not come.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    writers = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
    hooks = "write_on_batch_end", "write_on_epoch_end"
    return all_undone(
        [
            patch(writer, hook, _without_others(getattr(writer, hook)) if has else _written_elsewhere)
            for writer in writers
            for hook in hooks
        ]
    )


def _written_elsewhere(*args: Any, **kwargs: Any) -> None:
    pass


def _without_others(write: Callable[..., None]) -> Callable[..., None]:
    @wraps(write)
    def alone(*args: Any, **kwargs: Any) -> None:
        refused = all_undone([patch(dist, name, _refusing(name)) for name in _COLLECTIVES])
        try:
            write(*args, **kwargs)
        finally:
            refused()

    return alone


def _refusing(name: str) -> Callable[..., Any]:
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = signature.bind(*args, **kwargs).arguments.get("group")
        if group is None or group is dist.group.WORLD:
            raise SplitError(
                f"a prediction writer calls torch.distributed.{name} for all ranks, and runs on those with "
                "predictions alone, which are whole there: write them as on one device"
            )
        return original(*args, **kwargs)

    return collective


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
