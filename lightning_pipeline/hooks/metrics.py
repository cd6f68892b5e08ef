"""torchmetrics objects of a module: updated on the last stage, their value the same on every rank."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_pipeline.model.state import ElsewhereError
from lightning_pipeline.model.trace import named_metrics
from lightning_pipeline.patching import all_undone, patch
from lightning_pipeline.ranks import Board, Outlet, on_device


class SharedMetrics:
    """Makes `compute()` of every metric mean: the value of the last stage, on every rank that asks.

    The last stage's rank works a value out whenever it is asked, and leaves it for the others: a progress
    bar or logger, which only global rank 0 has, may ask alone. Another rank's `compute()` waits until the
    last stage's was called; the hooks of a LightningModule and Lightning's own epoch end do so on all ranks.

    Args:
        module: The LightningModule.
        outlet: From the last stage's rank of this replica to the others.
        board: Of this replica.
        replicas: The data-parallel group of this rank's stage; on the last stage metrics gather over it.
    """

    def __init__(
        self, module: nn.Module, outlet: Outlet, board: Board, replicas: dist.ProcessGroup | None
    ) -> None:
        self._outlet, self._board, self._inside, self._elsewhere = outlet, board, False, False
        self._steps = 0
        self._asked: Counter[str] = Counter()  # how often since the last step, by name
        self._posted: list[str] = []
        undo = []
        several = replicas is not None and replicas.size() > 1
        held = named_metrics(module)
        parts = {
            f"{name}.{inner}".strip("."): m for name, one in held.items() for inner, m in one.named_modules()
        }
        named = {id(m): (name, m) for name, m in parts.items() if isinstance(m, Metric)}
        for name, metric in named.values():
            changed: dict[str, Any] = {"compute": partial(self._compute, name, metric, metric.compute)}
            if outlet.is_source:
                changed |= {"process_group": replicas} if several else {"distributed_available_fn": _alone}
            undo += [patch(metric, name, value) for name, value in changed.items()]
        self.restore = all_undone(undo)
        """Gives the metrics their own `compute` and group back."""

    def _compute(
        self, name: str, metric: Metric, compute: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._elsewhere:
            raise ElsewhereError(
                "the value of a metric is on the last stage, which runs this hook to its end"
            )
        if self._inside or self._outlet.group is None:  # a step on the last stage, or it computes others
            return compute(*args, **kwargs)
        key = f"metric/{name}/{self._steps}/{self._asked[name]}"
        self._asked[name] += 1
        if not self._outlet.is_source:
            return on_device(self._board.read(key, f"the value of metric {name!r}"), metric.device)
        self._posted.append(key)
        with self.local():
            return self._board.post(key, partial(compute, *args, **kwargs))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For the time of a step, on all ranks: `local`, and values of before are old."""
        self._steps += 1
        self._asked.clear()
        with self.local():
            yield
        posted, self._posted = self._posted, []  # ranks that asked have done so: they took part in this step
        for key in posted:
            self._board.remove(key)

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


def _alone() -> bool:
    """With one replica the last stage's metrics have nobody to gather from."""
    return False
