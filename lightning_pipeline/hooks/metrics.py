"""torchmetrics objects of a module: updated on the last stage, their value the same on every rank."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric, MetricTracker
from torchmetrics.metric import jit_distributed_available

from lightning_pipeline.model.places import Owner, changes_of_metrics, metrics_born, named_metrics
from lightning_pipeline.model.state import ElsewhereError, Sent, left_in, put_in
from lightning_pipeline.patching import Undo, all_undone, patch
from lightning_pipeline.ranks import Board, Outlet, on_device

_MOST = 1 << 16  # bytes of attributes of a metric that are told after a step


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
        several = replicas is not None and replicas.size() > 1
        whole: dict[str, Any] = (
            {"process_group": replicas} if several else {"distributed_available_fn": _alone}
        )
        self._gathers = whole if outlet.is_source else {**whole, "distributed_available_fn": _not_here}
        self._undo: list[Undo] = []
        self._own: dict[int, tuple[Metric, dict[str, Any]]] = {}  # what metrics had before, by `id`
        self._of_users: dict[str, Metric] = {}  # whose classes may count something beside their states
        self._module = module
        self._look()
        self._undo += [_as_one_device(replicas), metrics_born(module, lambda: not self._inside)]
        trackers = {name: m for name, m in module.named_modules() if isinstance(m, MetricTracker)}
        if trackers:
            self._undo.append(self._watch(trackers))

    def restore(self) -> None:
        """Give the metrics their own `compute` and group back."""
        undo, self._undo = self._undo, []
        self._own.clear()
        all_undone(undo)()

    def _look(self) -> None:
        """Share metrics that there were not before."""
        self._changes = changes_of_metrics(self._module)
        self._share(named_metrics(self._module))

    def _look_again(self) -> None:
        if changes_of_metrics(self._module) != self._changes:
            self._look()

    def _share(self, held: Mapping[str, nn.Module]) -> None:
        parts = {
            f"{name}.{inner}".strip("."): m for name, one in held.items() for inner, m in one.named_modules()
        }
        new = {name: m for name, m in parts.items() if isinstance(m, Metric) and id(m) not in self._own}
        named = {id(m): (name, m) for name, m in new.items()}
        self._of_users |= {
            name: m for name, m in named.values() if not type(m).__module__.startswith("torchmetrics.")
        }
        for name, metric in named.values():
            self._own[id(metric)] = metric, {key: getattr(metric, key) for key in self._gathers}
            changed = {"compute": partial(self._compute, name, metric, metric.compute), **self._gathers}
            self._undo += [patch(metric, key, value) for key, value in changed.items()]

    def _watch(self, trackers: Mapping[str, MetricTracker]) -> Undo:
        """Share also the copies of metrics that trackers of the module make, one for each `increment`.

        A copy is of a metric as it was before: it is asked after the run, too, and groups are not copied.
        """
        names = {id(tracker): name for name, tracker in trackers.items()}
        original = MetricTracker.increment

        @wraps(original)
        def increment(tracker: MetricTracker) -> None:
            known = [self._own[id(m)] for m in tracker.modules() if id(m) in self._own]
            without = [patch(m, key, value) for m, own in known for key, value in own.items()]
            try:
                original(tracker)
            finally:
                all_undone(without)()
            name, place = names.get(id(tracker)), len(tracker) - 1
            if name is not None:
                self._share({f"{name}.{place}": tracker[place]})

        return patch(MetricTracker, "increment", increment)

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
    def in_whole_step(self) -> Iterator[None]:
        """For the time of a step that every rank runs whole: each gives metrics the values of the batch."""
        asked, several = "distributed_available_fn", "process_group" in self._gathers
        others = () if self._outlet.is_source else self._own.values()
        here = all_undone([patch(metric, asked, own[asked] if several else _alone) for metric, own in others])
        try:
            with self.in_step():
                yield
            self.tell_attributes()
        finally:
            here()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For the time of a step, on all ranks: `local`, and values of before are old."""
        self._steps += 1
        self._asked.clear()
        self._look_again()
        with self.local():
            yield
        self._look_again()  # the step was traced
        posted, self._posted = self._posted, []  # ranks that asked have done so: they took part in this step
        for key in posted:
            self._board.remove(key)

    def tell_attributes(self) -> None:
        """Let metrics of the user's own classes have attributes beside their states as on the last stage.

        All ranks call it after each step, when metrics have been given what they get.
        """
        if not self._of_users or self._outlet.group is None:
            return
        owners = {name: Owner(vars(metric), f"{name}.") for name, metric in self._of_users.items()}

        def left() -> dict[str, dict[str, Sent]]:
            """By metric, and by the label of the attribute."""
            return {
                name: left_in([owners[name].place(key) for key in _attributes(metric)], _MOST)[0]
                for name, metric in self._of_users.items()
            }

        told = self._outlet.share(left)
        for name, own in () if self._outlet.is_source else told.items():
            places = [owners[name].place(label.removeprefix(f"{name}.")) for label in own]
            put_in(places, own, self._of_users[name].device)

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


def _attributes(metric: Metric) -> list[str]:
    """Names of what it keeps for itself beside its states."""
    return [key for key in vars(metric) if key[:1] != "_" and key not in metric._defaults]


def _as_one_device(replicas: dist.ProcessGroup | None) -> Undo:
    """Let metrics that no step updates, such as a callback's, take a replica's ranks for one device.

    All stages run the hooks, with the same data: torchmetrics would count it once for each of them, and wait
    for all where one rank alone asks. With several replicas metrics gather over these, as under DDP.

    Args:
        replicas: The data-parallel group of this rank's stage.
    """
    sync, several = Metric.sync, replicas is not None and replicas.size() > 1

    @wraps(sync)
    def synced(
        metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:  # fmt: skip
        asks = distributed_available or metric.distributed_available_fn
        if (
            asks is jit_distributed_available
            and (dist_sync_fn or process_group or metric.process_group) is None
        ):
            process_group, distributed_available = replicas, asks if several else _alone
        sync(metric, dist_sync_fn, process_group, should_sync, distributed_available)

    return patch(Metric, "sync", synced)


def _not_here() -> bool:
    """A copy of a metric that was made in the run, and asked on a rank that has not what it was given."""
    raise ElsewhereError(
        "a copy of a metric was made while the run was under way, and what it was given is on the last "
        "stage: make it in __init__, so that every rank knows it, or ask it on global rank 0 alone"
    )


def _alone() -> bool:
    """With one replica the last stage's metrics have nobody to gather from."""
    return False
