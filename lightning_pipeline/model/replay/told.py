"""What a step tells loggers and metrics, once, on the last stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.loss import Bent, Follower, MetricCalls, Part, stub_metrics
from lightning_pipeline.model.places import (
    around_metrics,
    changes_of_metrics,
    metrics_of,
    others_refused,
)
from lightning_pipeline.model.random import Generators, random_state_kept
from lightning_pipeline.model.tensors import (
    PlaceholderMode,
    TensorSpec,
)
from lightning_pipeline.model.trace import ToldOnce, note_logged, note_told, printed_once, stub_sinks
from lightning_pipeline.patching import patched

Sink = Callable[..., None]


class Told:
    """Calls of `root.log(...)` and the like, and of torchmetrics objects, on one rank.

    Args:
        root: The LightningModule.
        sinks: What the methods become on the last stage: called with the micro-batch's index and the user's
            arguments.
        mode: Of placeholders.
        has_last_stage: Whether what is told counts here.
        follower: Of the batch that runs; None where nothing is followed.

    Attributes:
        metrics: The module's torchmetrics objects.
        device: Of the run.
        calls: Takes the calls of metrics, where there are several micro-batches.
        lines: What the step prints and logs as information or more.
        microbatch: The one that runs on the last stage.
        made_up: What metrics give in runs that measure nothing.
        as_batch: Whether they give what they gave for the batch, as far as that is known.
        of_whole: Told, with the name of the method and whether no value of units was made up before, what the
            step of the whole batch logs.
        of_whole_begins: Told that it begins.
        returned: Told, with the micro-batch, what its step returns, where numbers are followed.
        returned_of_whole: Told what the step of the whole batch returns, and whether no value was made up.
        writes: Inside, what a run of a step gives to loggers is noted in a list, which it gives.
    """

    def __init__(
        self, root: nn.Module, sinks: Mapping[str, Sink], mode: PlaceholderMode, device: torch.device,
        *, has_last_stage: bool, follower: Callable[[], Follower | None],
    ) -> None:  # fmt: skip
        self._root, self._sinks, self._mode = root, dict(sinks), mode
        self.device, self._has_last_stage = device, has_last_stage
        self._follower = follower
        self._look_for_metrics()
        self.calls = MetricCalls(self._followed, self._know, self._is_of_all)
        self.lines = ToldOnce()
        self.microbatch, self.made_up, self.as_batch, self._by_copies = 0, 0.0, False, False
        self.of_whole: Callable[[str, bool, Any, Any], None] = lambda how, is_sure, args, kwargs: None
        self.of_whole_begins: Callable[[], None] = lambda: None
        self.returned: Callable[[int, Any], None] = lambda microbatch, result: None
        self.returned_of_whole: Callable[[Any, bool], None] = lambda result, is_sure: None
        self.writes: Callable[[], AbstractContextManager[list[Any]]] = lambda: nullcontext([])

    def changed(self) -> None:
        """Metrics may have come, as a tracker makes one for each epoch."""
        self._look_for_metrics()

    def _look_for_metrics(self) -> None:
        self._changes = changes_of_metrics(self._root)
        self.metrics = metrics_of(self._root)

    def begin(self) -> None:
        """A batch begins: hooks may have made metrics, and the step may have been seen to use others."""
        if changes_of_metrics(self._root) != self._changes:
            self._look_for_metrics()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the methods."""
        return tuple(self._sinks) or ("log", "log_dict")

    def part(self, value: Any, *, always: bool = False) -> Part:
        """What a number of the micro-batch that runs is of the batch's. See `Follower.part`."""
        return self.calls.part(value) or self._followed(value, always=always)

    def _followed(self, value: Any, *, always: bool = False) -> Part:
        follower = self._follower()
        return Part() if follower is None else follower.part(value, always=always)

    def _is_of_all(self, value: Any) -> bool:
        follower = self._follower()
        return follower is not None and follower.is_of_all(value)

    def returns(self, microbatch: int, result: Any) -> None:
        """The step of a micro-batch returns something."""
        with self._unfollowed():
            self.returned(microbatch, result)

    def returns_of_whole(self, result: Any, is_sure: bool) -> None:
        """That of the whole batch does."""
        with self._unfollowed():
            self.returned_of_whole(result, is_sure)

    def running(self) -> int | None:
        """The micro-batch whose step runs in this thread, on the last stage; -1 on another; or None."""
        if not self.lines.runs:
            return None
        return self.microbatch if getattr(self._mode.watcher, "is_last", True) else -1

    def _know(self, value: Any, bent: Bent) -> None:
        follower = self._follower()
        if follower is not None:
            follower.know(value, bent)

    def silent_metrics(self) -> AbstractContextManager[None]:
        """Inside, metrics take nothing, and give placeholders."""
        return stub_metrics(self.metrics, _drop, self._no_value)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The same for a run of a step more than on one device, which prints nothing."""
        with self.silent_metrics(), printed_once(self._root):
            yield

    def whole_noted(self) -> AbstractContextManager[None]:
        """Inside `silent_metrics`, for a step of the whole batch: what metrics are given is noted."""
        self.of_whole_begins()
        return self.calls.of_whole(self.metrics, self._unfollowed)

    @contextmanager
    def metrics_by_batch(self, step: str, sizes: Sequence[int]) -> Iterator[None]:
        """Inside, metrics are called once for all micro-batches, by `calls.settle()`; others are refused."""
        taken = self.calls.taken(self.metrics, step, sizes, lambda: self.microbatch)
        known = [*self.metrics, *self.calls.drafts]
        with taken, others_refused(self._root, known, is_traced=False):
            yield

    def _made_up(self) -> Tensor:
        return torch.full((), self.made_up, device=self.device)

    def _answer(self, metric: Any, nth: int, method: str, given: tuple[Any, Any]) -> Any:
        if self._by_copies and method == "forward":
            return self.calls.of_some(metric, given)
        return self.calls.answer(metric, nth) if self.as_batch else None

    def _note(self, metric: Any, method: str, arguments: Any) -> None:
        if self.as_batch:
            self.calls.as_one(self.made_up, metric, method, arguments)

    @contextmanager
    def nothing(self, *, by_copies: bool = False) -> Iterator[None]:
        """Inside, nothing is logged, printed or measured, and no random number is used up.

        Args:
            by_copies: Whether metrics give what copies give for what they are given.
        """
        self._by_copies = by_copies
        with ExitStack() as stack:
            stack.enter_context(random_state_kept(Generators(list(self._root.modules()))))
            stack.enter_context(printed_once(self._root))
            stack.enter_context(stub_sinks(self._root, self.names, _drop))
            stack.enter_context(stub_metrics(self.metrics, _drop, self._made_up, self._answer, self._note))
            yield

    @contextmanager
    def in_step(self, *, several: bool) -> Iterator[None]:
        """Logs and metrics count once, on the last stage; elsewhere their calls are dropped.

        Args:
            several: Whether the batch has micro-batches, of which the others print nothing again.
        """
        with ExitStack() as stack:
            if several:
                stack.enter_context(self.lines.batch(self._root))
            stack.enter_context(stub_sinks(self._root, tuple(self._sinks), _drop))
            if not self._has_last_stage:
                stack.enter_context(self.silent_metrics())
            if self._has_last_stage:
                checked = {name: self._checked(name, sink) for name, sink in self._sinks.items()}
                stack.enter_context(patched(self._root, checked))
            yield

    def to(
        self, record: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
    ) -> AbstractContextManager[None]:
        """Outside a step: give calls to `record`, with the method's name."""

        def sink(name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: record(name, args, kwargs)

        return patched(self._root, {name: sink(name) for name in self._sinks})

    def metrics_unfollowed(self) -> AbstractContextManager[None]:
        """Inside, what metrics compute is none of the step's own functions."""
        return around_metrics(self.metrics, self._unfollowed)

    def _checked(self, name: str, sink: Sink) -> Callable[..., None]:
        def log(*args: Any, **kwargs: Any) -> None:
            note_logged((name, args, kwargs))
            watcher: Any = self._mode.watcher
            if watcher is not None and not getattr(watcher, "is_last", True):
                note_told((args, kwargs))
                if getattr(watcher, "rehearses", False):
                    with self._unfollowed():
                        self.of_whole(name, watcher.is_sure, args, kwargs)
                return
            if watcher is not None:
                watcher.check_real((args, kwargs), f"self.{name}")
            with self._unfollowed():
                sink(self.microbatch, *args, **kwargs)

        return log

    @contextmanager
    def _unfollowed(self) -> Iterator[None]:
        watcher: Any = self._mode.watcher
        if not hasattr(watcher, "mixing"):
            yield
            return
        seeing = watcher.follow, watcher.mixing
        watcher.follow = watcher.mixing = None
        try:
            yield
        finally:
            watcher.follow, watcher.mixing = seeing

    def _no_value(self) -> Tensor:
        with self._unfollowed():
            return self._mode.make(TensorSpec((), (), torch.float32, self.device.type, False))


def _drop(call: Any) -> None:
    """Logs and metrics outside the last stage."""
    note_told(call)
