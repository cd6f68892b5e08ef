"""Hooks at an epoch's end that read what steps left behind, such as `torch.stack(self.outputs).mean()`.

What the end of a step fills is on the last stage only, and reading it elsewhere raises. So the hook counts
on the last stage: what it logs there is logged on every rank. On the other ranks it runs up to its first read
of such a value and is left there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_debug
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_pipeline.hooks.metrics import SharedMetrics
from lightning_pipeline.model.state import ElsewhereError
from lightning_pipeline.model.trace import Stand
from lightning_pipeline.patching import all_undone, patch
from lightning_pipeline.ranks import Outlet

STEP_OF_HOOK = {
    "on_train_epoch_end": "training_step",
    "on_validation_epoch_end": "validation_step",
    "on_test_epoch_end": "test_step",
    "on_predict_epoch_end": "predict_step",
}

Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # `log` or `log_dict`, and its arguments


class EpochEndHooks:
    """Wraps the user's hooks for the time of a run.

    Args:
        module: The LightningModule.
        is_late: Whether a step leaves attributes that only the last stage has.
        sinks_to: Makes a context in which what is logged goes to a function.
        outlet: From the last stage's rank of this replica to the others.
        metrics: Those of the module.
        aside: Makes a context in which nothing is completed over the ranks.
        place: Makes one in which ranks call units of each other.
    """

    def __init__(
        self, module: LightningModule, is_late: Callable[[str], bool],
        sinks_to: Callable[[Callable[..., None]], AbstractContextManager[None]], outlet: Outlet,
        metrics: SharedMetrics, aside: Callable[[], AbstractContextManager[None]],
        place: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._aside, self._place = aside, place
        self._module, self._outlet, self._metrics = module, outlet, metrics
        self._is_late, self._sinks_to = is_late, sinks_to
        own = [n for n in STEP_OF_HOOK if getattr(type(module), n) is not getattr(LightningModule, n)]
        self.restore = all_undone([patch(module, n, Stand(module, n, self._wrapped(n))) for n in own])
        """Gives the module its own hooks back."""

    def _wrapped(self, name: str) -> Callable[[], None]:
        hook = getattr(self._module, name)

        def run() -> None:
            if not self._is_late(STEP_OF_HOOK[name]):
                hook()
                return
            with self._aside():  # the last stage alone runs the hook to its end
                with self._place():
                    here = self._run_here(hook) if self._outlet.is_source else self._run_elsewhere(name, hook)
                calls = self._outlet.share(lambda: here)
            for method, args, kwargs in calls:
                getattr(self._module, method)(*self._found(args), **kwargs)

        return run

    def _run_here(self, hook: Callable[[], None]) -> list[Call]:
        calls: list[Call] = []
        with self._metrics.local(), self._sinks_to(lambda *call: calls.append(self._portable(*call))):
            hook()
        return calls

    def _run_elsewhere(self, name: str, hook: Callable[[], None]) -> list[Call]:
        with self._metrics.elsewhere(), self._sinks_to(lambda *call: None):
            try:
                hook()
            except ElsewhereError as error:
                rank_zero_debug(
                    f"{name} ends here on this rank, as the values are on the last stage: {error}"
                )
        return []

    def _portable(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A logged torchmetrics object travels as its name; every rank logs its own."""
        names = {
            id(m): n for n, m in self._module.named_modules() if isinstance(m, Metric | MetricCollection)
        }

        def pack(value: Any) -> Any:
            if isinstance(value, nn.Module):
                return _Named(names[id(value)])
            if isinstance(value, dict):
                return {key: pack(item) for key, item in value.items()}
            return value.detach().cpu() if isinstance(value, Tensor) else value

        return method, tuple(map(pack, args)), {key: pack(value) for key, value in kwargs.items()}

    def _found(self, args: tuple[Any, ...]) -> list[Any]:
        def unpack(value: Any) -> Any:
            if isinstance(value, _Named):
                return self._module.get_submodule(value.path)
            return {key: unpack(item) for key, item in value.items()} if isinstance(value, dict) else value

        return [unpack(value) for value in args]


class _Named:
    """A metric of the module, by its path."""

    def __init__(self, path: str) -> None:
        self.path = path
