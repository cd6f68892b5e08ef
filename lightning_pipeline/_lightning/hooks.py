"""Where Lightning calls the user's hooks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_pipeline._lightning.trainer import is_interrupted


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
    if not hook.startswith("on_"):
        return True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    module = trainer.lightning_module
    holders: list[tuple[Any, type]] = (
        [(module, LightningModule)]
        if kind == "[LightningModule"
        else [(callback, Callback) for callback in callbacks if callback.state_key == owner]
    )
    return any(
        hook in vars(holder) or getattr(type(holder), hook, None) is not getattr(base, hook, None)
        for holder, base in holders
    )
