"""What starts the processes of a run, and calls the Trainer in each."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

# Re-runs the script once per device. Since 1.6.
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from typing_extensions import override

__all__ = ["after_hooks", "make_launcher"]


def make_launcher(strategy: Any, start_method: str, num_processes: int, num_nodes: int) -> Any:
    """The launchers of Lightning's own multi-process strategies. They have no public names. Since 1.6."""
    if start_method == "popen":
        return _SubprocessScriptLauncher(strategy.cluster_environment, num_processes, num_nodes)
    return _MultiProcessingLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]  # checked


class _InThisProcess(_Launcher):
    """Starts nothing, where somebody else starts the processes."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Nobody was started."""


def after_hooks(launcher: Any) -> Any:
    """Let a launcher call `strategy.leave()` of the Trainer after its last hook, in every process. Since 2.0.

    No hook of a strategy comes after `on_fit_end` and `teardown` of callbacks and modules. To be deleted when
    there is one.

    Args:
        launcher: Of the strategy; `None` where somebody else starts the processes.

    Returns:
        The launcher.
    """
    launcher = _InThisProcess() if launcher is None else launcher
    launch = launcher.launch

    def launch_and_leave(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return launch(partial(_run_and_leave, function), *args, **kwargs)

    launcher.launch = launch_and_leave
    return launcher


def _run_and_leave(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    trainer = getattr(function, "__self__", None)
    if isinstance(trainer, Trainer):
        trainer.strategy.leave()  # type: ignore[attr-defined]  # of ours
    return result
