"""torchmetrics objects of a module: updated on the last stage, their value the same on every rank."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torchmetrics.metric
from torch import Tensor, nn
from torchmetrics import Metric, MetricTracker

from lightning_pipeline.model.state import ElsewhereError
from lightning_pipeline.model.tensors import tensors_in
from lightning_pipeline.model.trace import named_metrics
from lightning_pipeline.patching import Undo, all_undone, patch
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
        several = replicas is not None and replicas.size() > 1
        whole: dict[str, Any] = (
            {"process_group": replicas} if several else {"distributed_available_fn": _alone}
        )
        self._gathers = whole if outlet.is_source else {**whole, "distributed_available_fn": _not_here}
        self._undo: list[Undo] = []
        self._own: dict[int, tuple[Metric, dict[str, Any]]] = {}  # what metrics had before, by `id`
        self._share(named_metrics(module))
        self._undo.append(_gathered_once(replicas))
        trackers = {name: m for name, m in module.named_modules() if isinstance(m, MetricTracker)}
        if trackers:
            self._undo.append(self._watch(trackers))

    def restore(self) -> None:
        """Give the metrics their own `compute` and group back."""
        undo, self._undo = self._undo, []
        self._own.clear()
        all_undone(undo)()

    def _share(self, held: Mapping[str, nn.Module]) -> None:
        parts = {
            f"{name}.{inner}".strip("."): m for name, one in held.items() for inner, m in one.named_modules()
        }
        named = {id(m): (name, m) for name, m in parts.items() if isinstance(m, Metric)}
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
        finally:
            here()

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


def _gathered_once(replicas: dist.ProcessGroup | None) -> Undo:
    """Let metrics that no module has, such as a callback's, gather what all ranks of a replica have once.

    All stages run the hooks, with the same data: torchmetrics would count it once for each of them. What only
    some have been given, such as the last stage in a step, counts from all.

    Args:
        replicas: The data-parallel group of this rank's stage.
    """
    gather: Any = vars(torchmetrics.metric)["gather_all_tensors"]
    sync, number = Metric.sync, 1 if replicas is None else replicas.size()
    asked: list[tuple[Metric, list[bool]]] = []  # metrics that gather now, each with what was found

    def synced(metric: Metric, *args: Any, **kwargs: Any) -> None:
        asked.append((metric, []))
        try:
            sync(metric, *args, **kwargs)
        finally:
            asked.pop()

    def gathered(result: Tensor, group: Any = None) -> Any:
        if group is not None or not asked:
            return gather(result, group)
        metric, found = asked[-1]
        if not found:
            found.append(_is_alike(metric, number))
        every = gather(result, group)
        return every[:number] if found[0] else every  # those of the last stages: see `Numbering`

    changed = [(torchmetrics.metric, "gather_all_tensors", gathered), (Metric, "sync", synced)]
    return all_undone([patch(*one) for one in changed])


def _is_alike(metric: Metric, number: int) -> bool:
    """Whether all stages of each of so many replicas have been given the same; all ranks call.

    A metric's states count together: step times that each rank takes itself have the same number alone.
    """
    mine = [_summary(tensor) for tensor in tensors_in(metric.metric_state)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    parts = [every[replica::number] for replica in range(number)]
    return all(_are_close(part[0], other) for part in parts for other in part[1:])


def _summary(tensor: Tensor) -> tuple[tuple[int, ...], list[float]]:
    """The shape of a tensor, and a few numbers that tell its values from others."""
    values = tensor.detach().double().flatten()
    places = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    numbers = [values.sum(), values.square().sum(), (values * places).sum()]
    return tuple(tensor.shape), [float(one) for one in numbers]


def _are_close(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        mine[0] == theirs[0] and numpy.allclose(mine[1], theirs[1], rtol=1e-6, equal_nan=True)
        for mine, theirs in zip(one, other, strict=True)
    )


def _not_here() -> bool:
    """A copy of a metric that was made in the run, and asked on a rank that has not what it was given."""
    raise ElsewhereError(
        "a copy of a metric was made while the run was under way, and what it was given is on the last "
        "stage: make it in __init__, so that every rank knows it, or ask it on global rank 0 alone"
    )


def _alone() -> bool:
    """With one replica the last stage's metrics have nobody to gather from."""
    return False
