"""Where Lightning calls the user's hooks."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_pipeline._lightning.trainer import is_interrupted
from lightning_pipeline.patching import Undo, patch

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


def around_hooks(
    trainer: Trainer,
    context: Callable[[], AbstractContextManager[None]],
    gather: Callable[[Any], list[Any]],
) -> Callable[[], None]:
    """Enter a context around every hook of the user's that all ranks call; returns what undoes it.

    Each is called in `profiler.profile("[Callback]...")` or `("[LightningModule]...")`. Since 1.5.

    Args:
        trainer: Of the run.
        context: Made for each hook.
        gather: Collects an object of each rank: callbacks that not all have are called outside of it.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    counts = [Counter(keys) for keys in gather([callback.state_key for callback in callbacks])]
    common = {key for key, count in counts[0].items() if all(one[key] == count for one in counts)}
    known: dict[str, bool] = {}

    def listen(action_name: str) -> AbstractContextManager[None] | None:
        if action_name not in known:
            known[action_name] = _does_something(trainer, action_name, common)
        return context() if known[action_name] and not is_interrupted(trainer) else None

    return _listen(trainer, listen)


def before_hooks(trainer: Trainer, calls: Mapping[tuple[str, str], Callable[[], Any]]) -> Undo:
    """Call something before hooks, so that `trainer.callbacks` holds the user's alone. Since 1.5.

    Args:
        trainer: Whose hooks.
        calls: By kind and hook: "Callback", before each of them, or "LightningModule", after all callbacks.

    Returns:
        Undoes it.
    """
    known: dict[str, Callable[[], Any] | None] = {}

    def listen(action_name: str) -> None:
        if action_name not in known:
            kind, _, rest = action_name.removeprefix("[").partition("]")
            known[action_name] = calls.get((kind, rest.rpartition(".")[2]))
        call = known[action_name]
        if call is not None:
            call()

    return _listen(trainer, listen)


_Listener = Callable[[str], AbstractContextManager[None] | None]


class _Profile:
    """In the place of `profiler.profile`, which Lightning calls around every hook.

    Args:
        original: Of the profiler.

    Attributes:
        listeners: Called with the name of each action; what one returns is entered around the hook.
        remove: Puts the original back.
    """

    def __init__(self, original: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._original = original
        self.listeners: list[_Listener] = []
        self.remove: Undo

    def __call__(self, action_name: str) -> AbstractContextManager[Any]:
        inner = [context for one in tuple(self.listeners) if (context := one(action_name)) is not None]
        outer = self._original(action_name)
        for context in inner:
            outer = _within(outer, context)
        return outer


@contextmanager
def _within(outer: AbstractContextManager[Any], inner: AbstractContextManager[None]) -> Iterator[Any]:
    with outer as result, inner:
        yield result


def _listen(trainer: Trainer, listener: _Listener) -> Undo:
    """Tell somebody of every hook before it is called; returns what undoes it, in any order."""
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    if not isinstance(profiler.profile, _Profile):
        made = _Profile(profiler.profile)
        made.remove = patch(profiler, "profile", made)
    profile: _Profile = profiler.profile
    profile.listeners.append(listener)

    def undo() -> None:
        if listener in profile.listeners:
            profile.listeners.remove(listener)
        if not profile.listeners:
            profile.remove()

    return undo


def _does_something(trainer: Trainer, action_name: str, common: Container[str]) -> bool:
    """Whether a hook is of the user's, on all ranks, and not one of Lightning's that are empty."""
    kind, _, rest = action_name.partition("]")
    owner, _, hook = rest.rpartition(".")
    if kind not in ("[Callback", "[LightningModule") or (kind == "[Callback" and owner not in common):
        return False
    if kind == "[LightningModule" and _goes_over_parameters(trainer, hook):
        return True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    holders: list[Any] = [trainer.lightning_module]
    if kind == "[Callback":
        holders = [callback for callback in callbacks if callback.state_key == owner]
    functions = [f for one in holders for f in (vars(one).get(hook), getattr(type(one), hook, None))]
    return any(f is not None and not _is_in(f, _WITHOUT_WEIGHTS) for f in functions)


def has_own_hooks(trainer: Trainer, hooks: Iterable[str]) -> bool:
    """Whether the module or a callback has one of these hooks that is none of Lightning's own. Since 2.0.

    Args:
        trainer: Of the run.
        hooks: Their names.
    """
    holders: list[Any] = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    found = (getattr(one, hook, None) for hook in hooks for one in holders)
    return any(f is not None and not _is_in(f, ("lightning.pytorch.", "lightning_pipeline.")) for f in found)


def _goes_over_parameters(trainer: Trainer, hook: str) -> bool:
    """Whether Lightning's own version of a hook does more to gradients than to let go of them."""
    if hook == "optimizer_zero_grad":
        return any(not _is_in(type(one).zero_grad, "torch.") for one in trainer.optimizers)
    if hook != "configure_gradient_clipping" or not trainer.gradient_clip_val:
        return False
    own = type(trainer.precision_plugin).clip_gradients  # the strategy's part clips by norm
    return trainer.gradient_clip_algorithm not in (None, "norm") or not _is_in(own, "lightning.")


def _is_in(function: Any, packages: str | tuple[str, ...]) -> bool:
    return str(getattr(function, "__module__", "")).startswith(packages)
