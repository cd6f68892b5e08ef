"""Where Lightning calls the user's hooks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_pipeline._lightning.trainer import is_interrupted

_OVER_PARAMETERS = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
# Where hooks are defined that are empty, or look at logs and counts only.
_WITHOUT_WEIGHTS = (
    "lightning_pipeline.",
    "lightning.pytorch.core.",
    *(
        f"lightning.pytorch.callbacks.{name}"
        for name in ("callback", "checkpoint", "early_stopping", "lr_monitor", "model_checkpoint",
                     "model_summary", "progress", "rich_model_summary", "throughput_monitor", "timer")
    ),
)  # fmt: skip


def around_hooks(trainer: Trainer, context: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Enter a context around every hook of the user's; returns what undoes it.

    Each is called in `profiler.profile("[Callback]...")` or `("[LightningModule]...")`. Since 1.5.
    """
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    original = profiler.profile
    known: dict[str, bool] = {}

    @contextmanager
    def profile(action_name: str) -> Iterator[str]:
        if action_name not in known:
            known[action_name] = _does_something(trainer, action_name)
        entered = known[action_name] and not is_interrupted(trainer)
        with original(action_name), context() if entered else nullcontext():
            yield action_name

    profiler.profile = profile

    def undo() -> None:
        del profiler.profile

    return undo


def _does_something(trainer: Trainer, action_name: str) -> bool:
    """Whether a hook is of the user's, and not one of Lightning's that are empty."""
    kind, _, rest = action_name.partition("]")
    owner, _, hook = rest.rpartition(".")
    if kind not in ("[Callback", "[LightningModule"):
        return False
    if kind == "[LightningModule" and hook in _OVER_PARAMETERS:
        return True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    holders: list[Any] = [trainer.lightning_module]
    if kind == "[Callback":
        holders = [callback for callback in callbacks if callback.state_key == owner]
    return any(hook in vars(one) or not _knows_no_weights(type(one), hook) for one in holders)


def _knows_no_weights(cls: type, hook: str) -> bool:
    return str(getattr(getattr(cls, hook, None), "__module__", "")).startswith(_WITHOUT_WEIGHTS)
