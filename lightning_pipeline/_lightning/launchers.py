"""What starts the processes of a run, and calls the Trainer in each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

# Re-runs the script once per device. Since 1.6.
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher

# Ends a run that only looked for a number, such as that of `Tuner.lr_find`. Since 1.4.
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override

from lightning_pipeline.patching import patched

__all__ = ["make_launcher"]


class _Leaves:
    """Calls `strategy.leave()` of the Trainer after its last hook, in every process. Since 2.0.

    No hook of a strategy comes after `on_fit_end` and `teardown` of callbacks and modules. To be deleted when
    there is one.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function in every process."""
        launch: Any = super().launch  # type: ignore[misc]  # of the launcher beside this in the bases
        return launch(partial(_run_and_leave, function), *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes that it started: a Trainer is pickled with its launcher."""
        return {**vars(self), **({"procs": []} if hasattr(self, "procs") else {})}


class _InThisProcess(_Launcher):
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


class _Popen(_Leaves, _SubprocessScriptLauncher):
    """Runs the script once more for each rank."""


class _Processes(_Leaves, _MultiProcessingLauncher):
    """Forks or spawns the ranks."""


class _Alone(_Leaves, _InThisProcess):
    """Starts nothing, where somebody else starts the processes."""


def make_launcher(strategy: Any, start_method: str | None, num_processes: int, num_nodes: int) -> _Launcher:
    """The launchers of Lightning's own multi-process strategies. They have no public names. Since 1.6.

    Args:
        strategy: To launch.
        start_method: Of the processes; `None` where somebody else starts them.
        num_processes: On this node.
        num_nodes: Of the job.
    """
    if start_method is None:
        return _Alone()
    if start_method == "popen":
        return _Popen(strategy.cluster_environment, num_processes, num_nodes)
    return _Processes(strategy, start_method=start_method)  # type: ignore[arg-type]  # checked


def _run_and_leave(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    trainer = getattr(function, "__self__", None)
    if not isinstance(trainer, Trainer):
        return function(*args, **kwargs)
    strategy: Any = trainer.strategy
    with _telling_checkpoint(trainer, strategy.expect_checkpoint):
        try:
            result = function(*args, **kwargs)
        except _TunerExitException:  # the Trainer's hooks come next, and the strategy's teardown after them
            strategy.leaves_in_teardown = True
            raise
    strategy.leave()
    return result


@contextmanager
def _telling_checkpoint(trainer: Trainer, tell: Callable[[Any], None]) -> Iterator[None]:
    """Tell of the checkpoint that will be loaded, which a strategy learns after its setup. Since 1.6."""
    connector: Any = trainer._checkpoint_connector
    original = connector._select_ckpt_path

    def select(*args: Any, **kwargs: Any) -> Any:
        path = original(*args, **kwargs)
        tell(path)
        return path

    with patched(connector, {"_select_ckpt_path": select}):
        try:
            yield
        finally:
            tell(None)
