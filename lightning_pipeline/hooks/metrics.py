"""torchmetrics objects of a module: updated on the last stage, their value the same on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_pipeline.model.state import ElsewhereError
from lightning_pipeline.ranks import Outlet


class SharedMetrics:
    """Makes `compute()` of every metric mean: work it out on the last stage, give it to all ranks.

    Every rank must call `compute()` of the same metrics in the same order, which the hooks of a
    LightningModule and Lightning's own epoch end do.

    Args:
        module: The LightningModule.
        outlet: From the last stage's rank of this replica to the others.
        replicas: The data-parallel group of this rank's stage; on the last stage metrics gather over it.
    """

    def __init__(self, module: nn.Module, outlet: Outlet, replicas: dist.ProcessGroup | None) -> None:
        self._outlet, self._inside, self._elsewhere = outlet, False, False
        self._saved: list[tuple[Metric, dict[str, Any]]] = []
        several = replicas is not None and replicas.size() > 1
        for metric in {id(m): m for m in module.modules() if isinstance(m, Metric)}.values():
            changed: dict[str, Any] = {"compute": partial(self._compute, metric.compute)}
            if outlet.is_source:
                changed |= {"process_group": replicas} if several else {"distributed_available_fn": _alone}
            self._saved.append((metric, {name: getattr(metric, name) for name in changed}))
            _set(metric, changed)

    def _compute(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._elsewhere:
            raise ElsewhereError(
                "the value of a metric is on the last stage, which runs this hook to its end"
            )
        if self._inside:  # a step on the last stage, or a metric that computes others
            return compute(*args, **kwargs)
        with self.local():
            return self._outlet.share(partial(compute, *args, **kwargs))

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, `compute()` stays on this rank: the other stages are not there to take part."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, `compute()` raises: the last stage works it out without the others."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def restore(self) -> None:
        """Give the metrics their own `compute` and group back."""
        for metric, saved in self._saved:
            _set(metric, saved)
        self._saved = []


def _alone() -> bool:
    """With one replica the last stage's metrics have nobody to gather from."""
    return False


def _set(metric: Metric, values: dict[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(metric, name, value)
